"""A turn's output as Anthropic's API says it: events of blocks, or one message.

A block is opened, gets its pieces and is closed before the next one is opened. One of reasoning
gets a signature last: clients drop reasoning without one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from millstream_server.formats.events import Arguments, CallStart, Event, Reasoning, Text
from millstream_server.generation.output import FinishReason
from millstream_server.processor.choice import Delta
from millstream_server.processor.http.output import encode
from millstream_server.processor.output import PulledOutput

if TYPE_CHECKING:
    from millstream_server.processor.turn import Turn

SIGNATURE = "none"
"""Of every block of reasoning: it says that the text isn't signed, and no one checks it."""
Stop = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
_STOPS: Mapping[FinishReason, Stop] = {
    FinishReason.STOP: "end_turn",
    FinishReason.LENGTH: "max_tokens",
    FinishReason.TOOL_CALLS: "tool_use",
    FinishReason.CANCELLED: "max_tokens",
}


class MessageUsage(msgspec.Struct):
    """Counts of tokens, as Anthropic has them."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int


class MessageAnswer(msgspec.Struct):
    """The answer of /v1/messages; its blocks are of text, thinking or tool_use."""

    id: str
    model: str
    content: list[dict[str, Any]]
    stop_reason: Stop | None
    stop_sequence: str | None
    usage: MessageUsage
    type: Literal["message"]
    role: Literal["assistant"]


class MessageEvent(msgspec.Struct):
    """An event of /v1/messages, of the types that Anthropic has."""

    type: str


def _answer(
    turn: Turn, content: list[dict[str, Any]], stop: Stop | None, sequence: str | None
) -> MessageAnswer:
    answer_id = "msg_" + turn.request.request_id.removeprefix("req-")
    common = (turn.request.model, content, stop, sequence, _usage_of(turn))
    return MessageAnswer(answer_id, *common, "message", "assistant")


def _usage_of(turn: Turn) -> MessageUsage:
    used = turn.usage()
    prompt = used.prompt_tokens - used.cached_tokens  # this API counts the cached ones apart
    return MessageUsage(prompt, used.completion_tokens, used.cached_tokens, 0)


def _stop_of(delta: Delta) -> tuple[Stop | None, str | None]:
    if isinstance(delta.matched_stop, str):
        return "stop_sequence", delta.matched_stop
    return _STOPS[delta.finish_reason] if delta.finish_reason else None, None


def event(kind: str, **fields: Any) -> bytes:
    """Write an event, whose name is its data's type, too."""
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), encode({"type": kind, **fields}))


class MessageEvents(PulledOutput):
    """The events of one message."""

    __slots__ = ("_begun", "_blocks", "_open", "_text_event")

    def __init__(self) -> None:
        """Nothing was sent yet."""
        super().__init__()
        self._begun = False
        self._blocks = 0
        """How many were opened."""
        self._open: type[Event] | None = None
        """What the open block is of: `Text`, `Reasoning` or `CallStart`."""
        self._text_event = b""
        """What stands before the text of a piece of the open block."""

    def _of_text(self, text: str, tokens: int) -> Any:
        if not text:
            return None
        if self._open is Text:  # nearly always
            return self._text_event + encode(text) + b"}}\n\n"
        return b"".join(self._piece(Text(text)))

    def _of(self, deltas: Sequence[Delta], turn: Turn, *, complete: bool) -> tuple[Any]:
        parts: list[bytes] = []
        if not self._begun:
            self._begun = True
            empty = _answer(turn, [], None, None)
            empty.usage.output_tokens = 0
            parts.append(event("message_start", message=empty))
        for delta in deltas:
            pieces = [*delta.events, Text(delta.text)] if delta.text else delta.events
            for piece in pieces:
                parts += self._piece(piece)
        if complete:
            self._end(turn)
            parts += self._close()
            reason, sequence = _stop_of(deltas[-1])
            stop = {"stop_reason": reason, "stop_sequence": sequence}
            parts.append(event("message_delta", delta=stop, usage=_usage_of(turn)))
            parts.append(event("message_stop"))
        return (b"".join(parts) or None,)

    def _piece(self, piece: Event) -> Iterator[bytes]:
        """Write a piece, in a new block unless it continues the open one."""
        match piece:
            case Text(text):
                if self._open is not Text:
                    yield from self._begin(Text, {"type": "text", "text": ""})
                yield self._text_event + encode(text) + b"}}\n\n"
            case Reasoning(text):
                if self._open is not Reasoning:
                    block = {"type": "thinking", "thinking": "", "signature": ""}
                    yield from self._begin(Reasoning, block)
                yield self._delta({"type": "thinking_delta", "thinking": text})
            case CallStart(_, call_id, name):
                call: dict[str, Any] = {"type": "tool_use", "id": call_id, "name": name}
                yield from self._begin(CallStart, call | {"input": {}})
            case Arguments(_, json):
                yield self._delta({"type": "input_json_delta", "partial_json": json})

    def _begin(self, kind: type[Event], block: dict[str, Any]) -> Iterator[bytes]:
        yield from self._close()
        self._open, index = kind, self._blocks
        self._blocks += 1
        head = b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,'
        self._text_event = (head % index) + b'"delta":{"type":"text_delta","text":'
        yield event("content_block_start", index=index, content_block=block)

    def _delta(self, delta: dict[str, str]) -> bytes:
        return event("content_block_delta", index=self._blocks - 1, delta=delta)

    def _close(self) -> Iterator[bytes]:
        if self._open is Reasoning:
            yield self._delta({"type": "signature_delta", "signature": SIGNATURE})
        if self._open is not None:
            yield event("content_block_stop", index=self._blocks - 1)
        self._open = None


class WholeMessage(PulledOutput):
    """One message, when the turn is complete."""

    __slots__ = ("_blocks",)

    def __init__(self) -> None:
        """Nothing has come yet."""
        super().__init__()
        self._blocks: list[tuple[Event, list[str]]] = []
        """What each block begins with, and the texts of its pieces."""

    def _of_text(self, text: str, tokens: int) -> Any:
        self._add(Text(text))

    def _of(self, deltas: Sequence[Delta], turn: Turn, *, complete: bool) -> tuple[Any]:
        for delta in deltas:
            for piece in [*delta.events, Text(delta.text)] if delta.text else delta.events:
                self._add(piece)
        if not complete:
            return (None,)
        self._end(turn)
        content = [_block(start, "".join(texts)) for start, texts in self._blocks]
        return (encode(_answer(turn, content, *_stop_of(deltas[-1]))),)

    def _add(self, piece: Event) -> None:
        match piece:
            case Text(text) | Reasoning(text):
                if not self._blocks or type(self._blocks[-1][0]) is not type(piece):
                    self._blocks.append((piece, []))
                self._blocks[-1][1].append(text)
            case CallStart():
                self._blocks.append((piece, []))
            case Arguments(_, json):
                self._blocks[-1][1].append(json)


def _block(start: Event, text: str) -> dict[str, Any]:
    if isinstance(start, CallStart):
        return {"type": "tool_use", "id": start.id, "name": start.name, "input": _object(text)}
    if isinstance(start, Reasoning):
        return {"type": "thinking", "thinking": text, "signature": SIGNATURE}
    return {"type": "text", "text": text}


def _object(text: str) -> Any:
    """Return a call's arguments; those of a call that was cut are no JSON, and left out."""
    try:
        return msgspec.json.decode(text or "{}")
    except msgspec.DecodeError:
        return {}
