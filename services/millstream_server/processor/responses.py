"""Converts what a turn has generated to messages that every client takes.

gRPC libraries refuse messages above 4 MiB unless told otherwise, so no response is larger.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, MutableSequence, Sequence
from typing import Any, TypeAlias, TypeVar

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from millstream.v1 import processor_pb2, usage_pb2
from millstream_server.generation.output import TokenLogprob
from millstream_server.processor.choice import Delta
from millstream_server.processor.generation import Generation
from millstream_server.processor.text.tokenizer import TextModel
from millstream_server.protobuf import generation as from_worker
from millstream_server.runtime.errors import InvalidRequestError

M = TypeVar("M", bound=Message)

MAX_RESPONSE_BYTES = 4 << 20
_PART_BYTES = 2 << 20
"""A group of entries ends at this size; one entry is far smaller than the rest up to the limit."""
_IDS_AT_ONCE = 1 << 14
_CONVERTED_AT_ONCE = 1024
"""Most logprobs converted without giving other RPCs a turn."""


Started: TypeAlias = processor_pb2.TurnStarted | None
"""Of a turn's first message; None in the others."""


Fields: TypeAlias = dict[str, Any]
"""Fields of one ChatResponse or CompleteResponse: choices, prompt_logprobs, finished."""


def check_size(response: Message, field: str) -> None:
    """Refuse a request whose response is larger than clients take.

    Raises:
        InvalidRequestError: it is; ``field`` is what made it so large.
    """
    if (size := response.ByteSize()) > MAX_RESPONSE_BYTES:
        raise InvalidRequestError.of(
            field,
            f"too long: the response would have {size} bytes, and clients take "
            f"{MAX_RESPONSE_BYTES}; divide it",
        )


async def add_token_ids(field: MutableSequence[int], ids: MutableSequence[int]) -> None:
    """Move all of ``ids`` to ``field``, and let other RPCs have turns: a million takes 50 ms."""
    ids.reverse()
    while ids:
        part = ids[-_IDS_AT_ONCE:]
        del ids[-_IDS_AT_ONCE:]  # freed now; all at once would hold up the event loop as well
        part.reverse()
        field.extend(part)
        if ids:
            await asyncio.sleep(0)


def _groups(entries: list[M]) -> list[list[M]]:
    """Divide entries into groups of bounded size; one group, maybe empty, at least."""
    if len(entries) <= 1:
        return [entries]
    groups: list[list[M]] = [[]]
    size = 0
    for entry in entries:
        size += entry.ByteSize()
        if size > _PART_BYTES and groups[-1]:
            groups.append([])
            size = entry.ByteSize()
        groups[-1].append(entry)
    return groups


def started_to_proto(generation: Generation) -> processor_pb2.TurnStarted:
    """Convert the start of a turn."""
    request = generation.request
    return processor_pb2.TurnStarted(request_id=request.request_id, model=request.model)


def choices_to_proto(
    deltas: Sequence[Delta], generation: Generation
) -> list[processor_pb2.ChoiceDelta]:
    """Convert new output."""
    return [_delta(delta, generation) for delta in deltas]


def fits(message: Message) -> bool:
    """Return whether a message is so small that it need not be divided."""
    return message.ByteSize() <= _PART_BYTES


def parts_to_proto(deltas: Sequence[Delta], generation: Generation) -> Iterable[Fields]:
    """Convert new output to the fields of one message, or of several where it is too large."""
    choices = choices_to_proto(deltas, generation)
    if len(choices) == 1 and not generation.complete:
        return ({"choices": choices},)  # nearly every message
    return _parts(choices, generation)


def _parts(choices: list[processor_pb2.ChoiceDelta], generation: Generation) -> Iterator[Fields]:
    *others, last = _groups(choices)
    del choices  # they may wait long for a client to read
    others.reverse()
    while others:
        yield {"choices": others.pop()}
    if not generation.complete:
        yield {"choices": last}
        return
    if generation.prompt_logprobs():
        yield {"choices": last}
        last = []
        for part in _prompt_logprobs(generation):
            yield {"prompt_logprobs": part}
    generation.delivery.all_given()
    yield {"choices": last, "finished": _finished(generation)}


def _prompt_logprobs(generation: Generation) -> Iterator[list[processor_pb2.TokenLogprob]]:
    """Convert them bit by bit: what isn't sent isn't made."""
    at = 0
    while entries := generation.prompt_logprobs()[at : at + _CONVERTED_AT_ONCE]:
        at += len(entries)
        text = generation.text_model
        converted = processor_pb2.ChoiceDelta()
        for entry in entries:
            _add_logprob(converted.logprobs, entry, text)
        parts = _groups(list(converted.logprobs))
        parts.reverse()
        while parts:
            yield parts.pop()


def _delta(delta: Delta, generation: Generation) -> processor_pb2.ChoiceDelta:
    message = processor_pb2.ChoiceDelta(
        index=delta.index, text=delta.text, token_count=len(delta.token_ids)
    )
    if generation.options.return_token_ids:
        message.token_ids.extend(delta.token_ids)
    if delta.logprobs:
        text = generation.text_model
        for entry in delta.logprobs:
            _add_logprob(message.logprobs, entry, text)
    if delta.finish_reason is not None:
        message.finish_reason = from_worker.finish_reason_to_proto(delta.finish_reason)
        if isinstance(delta.matched_stop, str):
            message.matched_stop.text = delta.matched_stop
        elif delta.matched_stop is not None:
            message.matched_stop.token_id = delta.matched_stop
    return message


def _add_logprob(to: Any, entry: TokenLogprob, text: TextModel) -> None:
    """Write one token's logprob in place, which avoids copies, with the token's text and bytes."""
    token_bytes = text.token_bytes(entry.token_id)
    top = to.add(
        token_id=entry.token_id,
        text=token_bytes.decode("utf-8", "replace"),
        token_bytes=token_bytes,
        logprob=entry.logprob,
    ).top
    for token_id, logprob in entry.top:
        token_bytes = text.token_bytes(token_id)
        top.add(
            token_id=token_id,
            text=token_bytes.decode("utf-8", "replace"),
            token_bytes=token_bytes,
            logprob=logprob,
        )


def _finished(generation: Generation) -> processor_pb2.TurnFinished:
    usage = generation.usage()
    return processor_pb2.TurnFinished(
        usage=usage_pb2.GenerationUsage(
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            cached_tokens=usage.cached_tokens,
            media_tokens=usage.media_tokens,
        ),
        longest_pacing_interval=Duration(
            nanos=int(generation.delivery.paced.longest_interval_s % 1 * 1e9),
            seconds=int(generation.delivery.paced.longest_interval_s),
        ),
        weight_version=generation.weight_version,
    )
