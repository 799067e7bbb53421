"""Converts what a turn has generated to messages that every client takes.

gRPC libraries refuse messages above 4 MiB unless told otherwise, so no response is larger.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
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


def parts_to_proto(deltas: Sequence[Delta], generation: Generation) -> Iterable[Fields]:
    """Convert new output to the fields of one message, or of several where it is too large."""
    choices = [_delta(delta, generation) for delta in deltas]
    if len(choices) == 1 and not generation.complete:
        return ({"choices": choices},)  # nearly every message
    return _parts(choices, generation)


def _parts(choices: list[processor_pb2.ChoiceDelta], generation: Generation) -> Iterator[Fields]:
    *others, last = _groups(choices)
    for group in others:
        yield {"choices": group}
    if not generation.complete:
        yield {"choices": last}
        return
    logprobs = generation.prompt_logprobs()
    if logprobs:
        yield {"choices": last}
        last = []
    text = generation.text_model
    for at in range(0, len(logprobs), _CONVERTED_AT_ONCE):
        entries = logprobs[at : at + _CONVERTED_AT_ONCE]
        for part in _groups([logprob_to_proto(entry, text) for entry in entries]):
            yield {"prompt_logprobs": part}
    yield {"choices": last, "finished": _finished(generation)}


def _delta(delta: Delta, generation: Generation) -> processor_pb2.ChoiceDelta:
    message = processor_pb2.ChoiceDelta(
        index=delta.index, text=delta.text, token_count=len(delta.token_ids)
    )
    if generation.options.return_token_ids:
        message.token_ids.extend(delta.token_ids)
    if delta.logprobs:
        text = generation.text_model
        message.logprobs.extend(logprob_to_proto(entry, text) for entry in delta.logprobs)
    if delta.finish_reason is not None:
        message.finish_reason = from_worker.finish_reason_to_proto(delta.finish_reason)
        if isinstance(delta.matched_stop, str):
            message.matched_stop.text = delta.matched_stop
        elif delta.matched_stop is not None:
            message.matched_stop.token_id = delta.matched_stop
    return message


def logprob_to_proto(entry: TokenLogprob, text: TextModel) -> processor_pb2.TokenLogprob:
    """Convert one token's logprob, with the token's text and bytes."""
    return processor_pb2.TokenLogprob(
        token_id=entry.token_id,
        text=text.token_text(entry.token_id),
        token_bytes=text.token_bytes(entry.token_id),
        logprob=entry.logprob,
        top=[
            processor_pb2.TokenLogprob(
                token_id=token,
                text=text.token_text(token),
                token_bytes=text.token_bytes(token),
                logprob=logprob,
            )
            for token, logprob in entry.top
        ],
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
            nanos=int(generation.paced.longest_interval_s % 1 * 1e9),
            seconds=int(generation.paced.longest_interval_s),
        ),
        weight_version=generation.weight_version,
    )
