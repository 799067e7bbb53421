"""A turn's output as OpenAI's API says it: events (`Events`), or one body (`Whole`).

The two differ from endpoint to endpoint in what a `Shape` writes. Pieces of events that don't
change are written once per answer; what a token adds is its text.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

import msgspec

from millstream_server.generation.output import FinishReason, TokenLogprob
from millstream_server.processor.choice import Delta
from millstream_server.processor.output import PulledOutput
from millstream_server.processor.telemetry import Usage

if TYPE_CHECKING:
    from millstream_server.processor.choice import Choice
    from millstream_server.processor.text.tokenizer import TextModel
    from millstream_server.processor.turn import Turn

encode = msgspec.json.Encoder().encode
DONE = b"data: [DONE]\n\n"
LEAST_LOGPROB = -9999.0
"""For tokens that can't be: JSON has no infinity."""
Finish = Literal["stop", "length", "tool_calls"]
FINISH: Mapping[FinishReason, Finish] = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.TOOL_CALLS: "tool_calls",
    FinishReason.CANCELLED: "length",
}


class Head(msgspec.Struct):
    """What every event, and the whole body, begins with."""

    id: str
    object: str
    created: int
    model: str


class Shape(Protocol):
    """How an endpoint writes choices."""

    prefix: str
    """Of the answer's id."""
    kinds: tuple[str, str]
    """What `object` is in events, and in a whole body."""

    def event_parts(self, index: int) -> tuple[bytes, bytes]:
        """Return what stands before and behind the text in a choice that is text alone."""

    def choices(self, delta: Delta, turn: Turn, *, first: bool) -> Iterator[bytes]:
        """Write a delta as choices of events, in order."""

    def note(self, delta: Delta, turn: Turn) -> None:
        """Keep what a whole body needs of a delta, but its text."""

    def whole(self, choice: Choice) -> bytes:
        """Write a choice that is complete."""


class _Output(PulledOutput):
    """What both have in common."""

    __slots__ = ("_head", "_is_part", "_request_id", "_shape")

    def __init__(self, shape: Shape, request_id: str, kind: str, *, is_part: bool) -> None:
        """Write as ``shape`` does; ``kind`` is the value of `object`.

        ``is_part``: others are sent with it (`joined_output`), so it writes its choices only.
        """
        super().__init__()
        self._is_part = is_part
        self._shape = shape
        self._request_id = request_id
        self._head = Head("", kind, int(time.time()), "")

    def _begin_head(self, turn: Turn) -> bytes:
        """Write what comes first, without the closing brace."""
        head = self._head
        head.id = self._shape.prefix + self._request_id.removeprefix("req-")
        head.model = turn.request.model
        return encode(head)[:-1]


class Events(_Output):
    """Events, each with one choice; then that of the usage, if asked for, and `[DONE]`."""

    __slots__ = ("_after", "_before", "_begun", "_end_of_event", "_quick_parts", "_usage")

    def __init__(
        self, shape: Shape, request_id: str, *, usage: bool, is_part: bool = False
    ) -> None:
        """Write as ``shape`` does; with ``usage`` it comes last, and as null before."""
        super().__init__(shape, request_id, shape.kinds[0], is_part=is_part)
        self._usage = usage
        self._begun: set[int] = set()
        self._before = b""
        self._after = b',"usage":null}\n\n' if usage else b"}\n\n"
        self._quick_parts = (b"", b"")

    def _of_text(self, text: str, tokens: int) -> Any:
        if not text:
            return None
        before, after = self._quick_parts
        return before + encode(text) + after

    def _of(self, deltas: Sequence[Delta], turn: Turn, *, complete: bool) -> tuple[Any]:
        if not self._before:
            self._before = b"data: " + self._begin_head(turn)
            before, after = self._shape.event_parts(0)
            opening = self._before + b',"choices":[' + before
            self._quick_parts = (opening, after + b"]" + self._after)
        events: list[bytes] = []
        for delta in deltas:
            first = delta.index not in self._begun
            self._begun.add(delta.index)
            choices = self._shape.choices(delta, turn, first=first)
            events += [
                b'%b,"choices":[%b]%b' % (self._before, choice, self._after) for choice in choices
            ]
        if complete:
            self._end(turn)
            if not self._is_part:
                events.append(self.end(turn.usage()))
        return (b"".join(events) or None,)

    def end(self, usage: Usage) -> bytes:
        """Write what comes behind the choices."""
        if not self._usage:
            return DONE
        return b'%b,"choices":[],"usage":%b}\n\n%b' % (self._before, usage_of(usage), DONE)


class Whole(_Output):
    """One body, when the turn is complete."""

    __slots__ = ()

    def __init__(self, shape: Shape, request_id: str, *, is_part: bool = False) -> None:
        """Write as ``shape`` does."""
        super().__init__(shape, request_id, shape.kinds[1], is_part=is_part)

    def _of_text(self, text: str, tokens: int) -> Any:
        return None  # the choice keeps it

    def _of(self, deltas: Sequence[Delta], turn: Turn, *, complete: bool) -> tuple[Any]:
        for delta in deltas:
            self._shape.note(delta, turn)
        if not complete:
            return (None,)
        self._end(turn)
        choices = b",".join([self._shape.whole(choice) for choice in turn.choices])
        return (choices if self._is_part else self.body(choices, turn, turn.usage()),)

    def body(self, choices: bytes, turn: Turn, usage: Usage) -> bytes:
        """Write the body; the choices are written already."""
        head = self._begin_head(turn)
        return b'%b,"choices":[%b],"usage":%b}' % (head, choices, usage_of(usage))


class PromptTokens(msgspec.Struct):
    """Of the prompt's tokens."""

    cached_tokens: int


class CompletionTokens(msgspec.Struct):
    """Of the answer's tokens."""

    reasoning_tokens: int


class TokenUsage(msgspec.Struct):
    """Counts of tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokens
    completion_tokens_details: CompletionTokens


def usage_of(usage: Usage) -> bytes:
    """Write token counts."""
    prompt, completion = usage.prompt_tokens, usage.completion_tokens
    return encode(
        TokenUsage(
            prompt,
            completion,
            prompt + completion,
            PromptTokens(usage.cached_tokens),
            CompletionTokens(usage.reasoning_tokens),
        )
    )


class TopLogprob(msgspec.Struct):
    """A token that could have come."""

    token: str
    logprob: float
    bytes: list[int]


class Logprob(msgspec.Struct):
    """A token that came."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


def logprobs_of(entries: Sequence[TokenLogprob], text: TextModel) -> bytes:
    """Write tokens' logprobs, separated by commas."""
    return b",".join([encode(_logprob(entry, text)) for entry in entries])


def _logprob(entry: TokenLogprob, text: TextModel) -> Logprob:
    top = [TopLogprob(*_token(token, logprob, text)) for token, logprob in entry.top]
    return Logprob(*_token(entry.token_id, entry.logprob, text), top)


def _token(token_id: int, logprob: float, text: TextModel) -> tuple[str, float, list[int]]:
    found = text.token_bytes(token_id)
    return found.decode("utf-8", "replace"), finite(logprob), list(found)


def finite(logprob: float) -> float:
    """Return a logprob that JSON can say."""
    return logprob if math.isfinite(logprob) else LEAST_LOGPROB
