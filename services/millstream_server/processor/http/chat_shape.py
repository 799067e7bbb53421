"""How /v1/chat/completions writes choices."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from millstream_server.formats.events import Arguments, CallStart, Event, Reasoning, Text
from millstream_server.processor.choice import Delta
from millstream_server.processor.http.output import (
    FINISH,
    Finish,
    Head,
    Logprob,
    TokenUsage,
    encode,
    logprobs_of,
)

if TYPE_CHECKING:
    from millstream_server.processor.choice import Choice
    from millstream_server.processor.turn import Turn

_PLAIN = (b',"logprobs":null,"finish_reason":null}', b',"finish_reason":null}')


class _Function(msgspec.Struct, omit_defaults=True):
    name: str = ""
    arguments: str | None = None


class _CallPiece(msgspec.Struct, omit_defaults=True):
    index: int | None = None
    id: str = ""
    type: str = ""
    function: _Function = msgspec.field(default_factory=_Function)


class _Delta(msgspec.Struct, omit_defaults=True):
    role: str = ""
    content: str | None = None
    reasoning_content: str = ""
    reasoning: str = ""
    tool_calls: list[_CallPiece] = []


class AnsweredFunction(msgspec.Struct):
    """A call's tool, and its arguments as text."""

    name: str
    arguments: str


class AnsweredCall(msgspec.Struct):
    """A call."""

    id: str
    function: AnsweredFunction
    type: Literal["function"]


class ChatAnswer(msgspec.Struct):
    """What a model said."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    reasoning: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: list[AnsweredCall] | msgspec.UnsetType = msgspec.UNSET


class ChatShape:
    """Writes one chat's choices."""

    prefix = "chatcmpl-"
    kinds = ("chat.completion.chunk", "chat.completion")

    def __init__(self) -> None:
        """Nothing was noted yet."""
        self._calls: dict[int, list[tuple[CallStart, list[str]]]] = {}
        self._logprobs: dict[int, list[bytes]] = {}

    # ---- in events

    def event_parts(self, index: int) -> tuple[bytes, bytes]:
        return b'{"index":%d,"delta":{"content":' % index, b"}" + _PLAIN[0]

    def choices(self, delta: Delta, turn: Turn, *, first: bool) -> Iterator[bytes]:
        pieces = [piece for event in delta.events if (piece := _piece(event)) is not None]
        if delta.text:
            pieces.append(_Delta(content=delta.text))
        if first:
            if not pieces:
                pieces.append(_Delta(content=""))
            pieces[0].role = "assistant"
        logprobs = b""
        if delta.logprobs:
            logprobs = logprobs_of(delta.logprobs, turn.text_model)
            pieces = pieces or [_Delta(content="")]
        for piece in pieces:
            yield self._choice(delta.index, encode(piece), logprobs, b"null")
            logprobs = b""  # they come with the first piece
        if delta.finish_reason is not None:
            finish = encode(FINISH[delta.finish_reason])
            yield self._choice(delta.index, b"{}", b"", finish)

    def _choice(self, index: int, delta: bytes, logprobs: bytes, finish: bytes) -> bytes:
        said = b'{"content":[%b],"refusal":null}' % logprobs if logprobs else b"null"
        parts = (index, delta, said, finish)
        return b'{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":%b}' % parts

    # ---- whole

    def note(self, delta: Delta, turn: Turn) -> None:
        if delta.logprobs:
            found = self._logprobs.setdefault(delta.index, [])
            found.append(logprobs_of(delta.logprobs, turn.text_model))
        calls = self._calls.setdefault(delta.index, [])
        for event in delta.events:
            if isinstance(event, CallStart):
                calls.append((event, []))
            elif isinstance(event, Arguments):
                calls[-1][1].append(event.json)

    def whole(self, choice: Choice) -> bytes:
        said = choice.message
        calls = [
            AnsweredCall(start.id, AnsweredFunction(start.name, "".join(pieces)), "function")
            for start, pieces in self._calls.get(choice.index, ())
        ]
        message = ChatAnswer("assistant", said.text or (None if calls else ""), None)
        if said.reasoning:
            message.reasoning_content = message.reasoning = said.reasoning
        if calls:
            message.tool_calls = calls
        logprobs = b",".join(self._logprobs.get(choice.index, ()))
        shown = b'{"content":[%b],"refusal":null}' % logprobs if logprobs else b"null"
        finish = encode(FINISH[choice.finish_reason] if choice.finish_reason else None)
        parts = (choice.index, encode(message), shown, finish)
        return b'{"index":%d,"message":%b,"logprobs":%b,"finish_reason":%b}' % parts


def _piece(event: Event) -> _Delta | None:
    match event:
        case Text(text):
            return _Delta(content=text)
        case Reasoning(text):
            return _Delta(reasoning_content=text, reasoning=text)
        case CallStart(index, call_id, name):
            function = _Function(name, "")
            return _Delta(tool_calls=[_CallPiece(index, call_id, "function", function)])
        case Arguments(index, json):
            return _Delta(tool_calls=[_CallPiece(index, function=_Function(arguments=json))])
    return None  # a call's end has nothing to say


# ---- what `ChatShape`, `Events` and `Whole` write in pieces, for the document -------------------


class Logprobs(msgspec.Struct):
    """Of all tokens of a choice."""

    content: list[Logprob]
    refusal: None


class ChatChoice(msgspec.Struct):
    """One of `n` answers."""

    index: int
    message: ChatAnswer
    logprobs: Logprobs | None
    finish_reason: Finish | None


class ChatCompletion(Head):
    """The answer of /v1/chat/completions."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: TokenUsage


class ChunkChoice(msgspec.Struct):
    """What is new of an answer: `delta` has fields of a message."""

    index: int
    delta: dict[str, Any]
    logprobs: Logprobs | None
    finish_reason: Finish | None


class ChatCompletionChunk(Head):
    """An event of /v1/chat/completions."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChunkChoice]
    usage: TokenUsage | msgspec.UnsetType | None = msgspec.UNSET
