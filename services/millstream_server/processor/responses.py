"""Makes messages that every client takes of what a turn has generated.

gRPC libraries refuse messages above 4 MiB unless told otherwise, so no response is larger.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, MutableSequence, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from google.protobuf.message import Message

from millstream.v1 import errors_pb2, processor_pb2
from millstream_server.formats.calls import Call as ToolCall
from millstream_server.formats.events import (
    Arguments,
    CallEnd,
    CallStart,
    Event,
    Reasoning,
    Text,
)
from millstream_server.generation import wire as from_worker
from millstream_server.generation.output import TokenLogprob
from millstream_server.processor.choice import Delta
from millstream_server.processor.output import PulledOutput
from millstream_server.processor.text.tokenizer import TextModel
from millstream_server.processor.texts import Tokens
from millstream_server.runtime.errors import InvalidRequestError

if TYPE_CHECKING:
    from millstream_server.processor.turn import Turn

M = TypeVar("M", bound=Message)

MAX_RESPONSE_BYTES = 4 << 20
_PART_BYTES = 2 << 20
"""A group of entries ends at this size; one entry is far smaller than the rest up to the limit."""
_USES = 64
"""So often a message is filled again: protobuf frees replaced texts only with the whole message."""
_IDS_AT_ONCE = 1 << 14
_CONVERTED_AT_ONCE = 1024
"""Most logprobs converted without giving other RPCs a turn."""


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


async def add_token_bytes(field: MutableSequence[bytes], tokens: Tokens) -> None:
    """Write the bytes of each token to ``field``, and let other RPCs have turns."""
    for start in range(0, len(tokens.ids), _IDS_AT_ONCE):
        if start:
            await asyncio.sleep(0)
        field.extend(map(tokens.bytes_of, tokens.ids[start : start + _IDS_AT_ONCE]))


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


class Messages(PulledOutput):
    """A turn's output as messages of Chat or Complete; a `runtime.rpc.call.Source`."""

    __slots__ = ("_choice", "_events", "_filled", "_kind", "_notice", "_number", "_said",
                 "_started", "_uses_left")  # fmt: skip

    def __init__(
        self,
        kind: Callable[..., Any],
        number: int = 0,
        notice: Callable[[], bool] | None = None,
        *,
        events: bool = False,
    ) -> None:
        """Make messages of a ``kind``; of a chat's turn ``number``.

        ``notice`` returns whether the next one says that the server shuts down: once True.
        ``events``: texts are events.
        """
        self._kind = kind
        self._number = number
        self._notice = notice
        self._events = events
        super().__init__()
        self._started = False
        self._filled: Any = None
        self._choice: Any = None
        self._said: Any = None
        """What has the text: the choice, or its event."""
        self._uses_left = 0

    def _of_text(self, text: str, tokens: int) -> Any:
        """Make a message that is not the first: one choice's text and its number of tokens.

        The same message is filled again, which takes a fraction of the time to make one.
        """
        empty = self._events and not text  # no event then
        if empty or not self._uses_left:
            self._uses_left = 1 if empty else _USES
            self._filled = self._kind(turn=self._number) if self._number else self._kind()
            self._choice = self._said = self._filled.choices.add()
            if self._events and text:
                self._said = self._choice.events.add()
        self._uses_left -= 1
        self._said.text = text
        self._choice.token_count = tokens
        if self._notice is not None and self._notice():
            self._filled.draining.SetInParent()
            self._uses_left = 0
        return self._filled

    def _of(
        self, deltas: Sequence[Delta], turn: Turn, *, complete: bool
    ) -> tuple[Any] | Iterator[Any]:
        """Make one message or, of large output, several."""
        if self._events:
            for each in [each for each in deltas if each.text]:
                each.events, each.text = (Text(each.text),), ""
        several = complete and _prompt_logprobs(turn)
        if len(deltas) > 1 or several:
            groups = _groups([_write_delta(processor_pb2.ChoiceDelta(), d, turn) for d in deltas])
            if len(groups) > 1 or several:
                return self._parts(groups, turn)
            message = self._message(turn, groups[0])
        else:  # nearly always; written in place, which takes half the time
            message = self._message(turn)
            for delta in deltas:
                _write_delta(message.choices.add(), delta, turn)
        if complete:
            self._finish(message.finished, turn)
        return (message,)

    def _message(self, turn: Turn, choices: Sequence[processor_pb2.ChoiceDelta] = ()) -> Any:
        message = self._kind()
        if self._number:
            message.turn = self._number
        if not self._started:
            self._started, started = True, message.started
            started.request_id = turn.request.request_id
            started.model = turn.request.model
        if self._notice is not None and self._notice():
            message.draining.SetInParent()
        if choices:
            message.choices.extend(choices)
        return message

    def _parts(self, groups: list[list[processor_pb2.ChoiceDelta]], turn: Turn) -> Iterator[Any]:
        groups.reverse()
        while len(groups) > 1:  # one by one: they may wait long for a client to read
            yield self._message(turn, groups.pop())
        last = groups.pop()
        if not turn.complete:
            yield self._message(turn, last)
            return
        if _prompt_logprobs(turn):
            yield self._message(turn, last)
            last = []
            for part in _converted_prompt_logprobs(turn):
                message = self._message(turn)
                message.prompt_logprobs.extend(part)
                yield message
        message = self._message(turn, last)
        self._finish(message.finished, turn)
        yield message

    def _finish(self, message: processor_pb2.TurnFinished, turn: Turn) -> None:
        """Write the turn's end: the message is its last one."""
        self._end(turn)
        used, usage = message.usage, turn.usage()
        used.prompt_tokens = usage.prompt_tokens
        used.completion_tokens = usage.completion_tokens
        used.cached_tokens = usage.cached_tokens
        used.media_tokens = usage.media_tokens
        used.reasoning_tokens = usage.reasoning_tokens
        interval = message.longest_pacing_interval
        interval.seconds = int(self.longest_interval_s)
        interval.nanos = int(self.longest_interval_s % 1 * 1e9)
        # Several versions only if the choices differ in it.
        results = [choice.result for choice in turn.choices]
        versions = dict.fromkeys([r.weight_version for r in results if r and r.weight_version])
        message.weight_version = ", ".join(versions)
        for each in turn.redispatches:
            message.redispatches.add(
                index=each.index,
                token_count=each.tokens,
                reason=errors_pb2.ErrorReason.Value("ERROR_REASON_" + each.reason),
                way=processor_pb2.RedispatchWay.Value("REDISPATCH_WAY_" + each.way.value),
            )


def _prompt_logprobs(turn: Turn) -> Sequence[TokenLogprob]:
    """Return the prompt's logprobs; empty if not requested or not complete."""
    result = turn.choices[0].prompt.result
    return result.prompt_logprobs if result else ()


def _converted_prompt_logprobs(turn: Turn) -> Iterator[list[processor_pb2.TokenLogprob]]:
    """Convert them bit by bit: what isn't sent isn't made."""
    at = 0
    while entries := _prompt_logprobs(turn)[at : at + _CONVERTED_AT_ONCE]:
        at += len(entries)
        text = turn.text_model
        converted = processor_pb2.ChoiceDelta()
        for entry in entries:
            _add_logprob(converted.logprobs, entry, text)
        parts = _groups(list(converted.logprobs))
        parts.reverse()
        while parts:
            yield parts.pop()


def _write_delta(
    message: processor_pb2.ChoiceDelta, delta: Delta, turn: Turn
) -> processor_pb2.ChoiceDelta:
    message.index = delta.index
    message.text = delta.text
    message.token_count = len(delta.token_ids)
    if turn.options.return_token_ids:
        message.token_ids.extend(delta.token_ids)
    if delta.events:
        add_events(message, delta.events)
    add_calls(message, delta.calls)
    for entry in delta.logprobs:
        _add_logprob(message.logprobs, entry, turn.text_model)
    if delta.finish_reason is not None:
        message.finish_reason = from_worker.finish_reason_to_proto(delta.finish_reason)
        if isinstance(delta.matched_stop, str):
            message.matched_stop.text = delta.matched_stop
        elif delta.matched_stop is not None:
            message.matched_stop.token_id = delta.matched_stop
    return message


def add_calls(
    message: processor_pb2.ChoiceDelta | processor_pb2.ParseFinished, calls: Sequence[ToolCall]
) -> None:
    """Add an answer's tool calls, whole."""
    for call in calls:
        message.tool_calls.add(
            id=call.id,
            name=call.name,
            arguments_json=call.arguments_json,
            incomplete=call.incomplete,
        )


def add_events(
    message: processor_pb2.ChoiceDelta | processor_pb2.ParseResponse, events: Sequence[Event]
) -> None:
    """Add what an answer consists of."""
    add = message.events.add
    for event in events:
        match event:
            case Text(text):
                add().text = text
            case Reasoning(text):
                add().reasoning = text
            case Arguments(_, fragment):
                add().tool_call_arguments_json = fragment
            case CallStart(index, call_id, name):
                start = add().tool_call_start
                start.index, start.id, start.name = index, call_id, name
            case CallEnd(_, incomplete):
                end = add().tool_call_end
                end.SetInParent()
                end.incomplete = incomplete


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
