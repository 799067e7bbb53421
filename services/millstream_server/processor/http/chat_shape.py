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

_CALL_PIECE = b'{"tool_calls":[{"index":%d,%b"function":{%b"arguments":%b}}]}'
_PLAIN = (b',"logprobs":null,"finish_reason":null}', b',"finish_reason":null}')


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
            pieces.append(b'{"content":%b}' % encode(delta.text))
        if not pieces and (first or delta.logprobs):
            pieces = [b'{"content":""}']
        if first:
            pieces[0] = b'{"role":"assistant",' + pieces[0][1:]
        logprobs = logprobs_of(delta.logprobs, turn.text_model) if delta.logprobs else b""
        for piece in pieces:
            yield self._choice(delta.index, piece, logprobs, b"null")
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


def _piece(event: Event) -> bytes | None:
    match event:
        case Text(text):
            return b'{"content":%b}' % encode(text)
        case Reasoning(text):
            said = encode(text)
            return b'{"reasoning_content":%b,"reasoning":%b}' % (said, said)
        case CallStart(index, call_id, name):
            begins = (b'"id":%b,"type":"function",' % encode(call_id), b'"name":%b,' % encode(name))
            return _CALL_PIECE % (index, *begins, b'""')
        case Arguments(index, json):
            return _CALL_PIECE % (index, b"", b"", encode(json))
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
