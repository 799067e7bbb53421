"""A turn's output as the Responses API says it: events of items, or one response.

An item is added, gets its pieces and is done before the next one is added. It is the same, with its
id, in the events and in the response that they end with.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from millstream_server.formats.events import (
    Arguments,
    CallEnd,
    CallStart,
    Event,
    Reasoning,
    Text,
)
from millstream_server.generation.output import FinishReason
from millstream_server.processor.choice import Delta
from millstream_server.processor.http.output import DONE, encode
from millstream_server.processor.http.responses.items import (
    CustomCall,
    FunctionCall,
    Item,
    Message,
    SearchCall,
    Thought,
)
from millstream_server.processor.http.responses.shown import Shown
from millstream_server.processor.http.responses.tools import SEARCH, Tools
from millstream_server.processor.output import PulledOutput

if TYPE_CHECKING:
    from millstream_server.processor.turn import Turn

_CALLS = {"custom": CustomCall, SEARCH: SearchCall}
_CUT = {FinishReason.LENGTH, FinishReason.CANCELLED}
_DELTA = b'event: %b.delta\ndata: {"type":"%b.delta",%b,"sequence_number":'


class ResponseEvent(msgspec.Struct):
    """An event of /v1/responses: what else it has depends on its type."""

    type: str
    sequence_number: int


class ResponseOutput(PulledOutput):
    """What both have in common: the items."""

    __slots__ = ("_answer_id", "_items", "_open", "_shown", "_tools")

    def __init__(self, shown: Shown, tools: Tools, request_id: str) -> None:
        """Begin; ``shown`` is what the response repeats of its request."""
        super().__init__()
        self._shown = shown
        self._tools = tools
        self._answer_id = request_id.removeprefix("req-")
        self._items: list[Item] = []
        self._open: Item | None = None
        """The last of ``_items``, unless it is done."""

    def _read(self, deltas: Sequence[Delta], *, complete: bool) -> str:
        """Make items of what has come; return the response's status."""
        for delta in deltas:
            for piece in [*delta.events, Text(delta.text)] if delta.text else delta.events:
                self._add(piece)
        if not complete:
            return "in_progress"
        status = "incomplete" if deltas[-1].finish_reason in _CUT else "completed"
        if not self._items:  # an answer has something, if only an empty text
            self._begin(Message(self._answer_id, 0))
        self._close(status)
        return status

    def _add(self, piece: Event) -> None:
        match piece:
            case Text(text):
                self._grow(Message, text)
            case Reasoning(text):
                self._grow(Thought, text)
            case CallStart(_, call_id, name):
                own = self._tools.own(name)
                kind = _CALLS.get(own.type, FunctionCall)
                self._begin(kind(self._answer_id, len(self._items), call_id, own))
            case Arguments(_, json):
                self._grow_open(json)
            case CallEnd(_, incomplete):
                self._close("incomplete" if incomplete else "completed")

    def _grow(self, kind: type[Item], text: str) -> None:
        if type(self._open) is not kind:
            self._begin(kind(self._answer_id, len(self._items)))
        self._grow_open(text)

    def _begin(self, item: Item) -> None:
        self._close("completed")
        self._items.append(item)
        self._open = item
        self._added(item)

    def _grow_open(self, piece: str) -> None:
        item = self._open
        if item is not None and (text := item.read(piece)):
            item.texts.append(text)
            self._grown(item, text)

    def _close(self, status: str) -> None:
        item, self._open = self._open, None
        if item is None:
            return
        if rest := item.finish():
            item.texts.append(rest)
            self._grown(item, rest)
        item.status = status
        self._done(item)

    def _response(self, turn: Turn, status: str) -> bytes:
        """Write the response as it is now."""
        items = [item.shown() for item in self._items]
        return self._shown.response(self._answer_id, turn, status, items)

    @abstractmethod
    def _added(self, item: Item) -> None:
        """Tell of a new item."""

    @abstractmethod
    def _grown(self, item: Item, text: str) -> None:
        """Tell of an item's next piece."""

    @abstractmethod
    def _done(self, item: Item) -> None:
        """Tell of an item that is done."""


class WholeResponse(ResponseOutput):
    """One response, when the turn is complete."""

    __slots__ = ()

    def _of_text(self, text: str, tokens: int) -> Any:
        self._grow(Message, text)

    def _of(self, deltas: Sequence[Delta], turn: Turn, *, complete: bool) -> tuple[Any]:
        status = self._read(deltas, complete=complete)
        if not complete:
            return (None,)
        self._end(turn)
        return (self._response(turn, status),)

    def _added(self, item: Item) -> None: ...

    def _grown(self, item: Item, text: str) -> None: ...

    def _done(self, item: Item) -> None: ...


class ResponseEvents(ResponseOutput):
    """The events of one response, numbered from 0; then `[DONE]`."""

    __slots__ = ("_delta", "_number", "_parts")

    def __init__(self, shown: Shown, tools: Tools, request_id: str) -> None:
        super().__init__(shown, tools, request_id)
        self._number = 0
        """Of the next event."""
        self._parts: list[bytes] = []
        """Events of the message that is being made."""
        self._delta = b""
        """What stands before the number of a piece of the open item."""

    def _of_text(self, text: str, tokens: int) -> Any:
        if text:
            self._grow(Message, text)
        return self._taken()

    def _of(self, deltas: Sequence[Delta], turn: Turn, *, complete: bool) -> tuple[Any]:
        if not self._number:
            for kind in ("created", "in_progress"):
                now = msgspec.Raw(self._response(turn, "in_progress"))
                self._event(f"response.{kind}", response=now)
        status = self._read(deltas, complete=complete)
        if complete:
            self._end(turn)
            self._event(f"response.{status}", response=msgspec.Raw(self._response(turn, status)))
            self._parts.append(DONE)
        return (self._taken(),)

    def _taken(self) -> bytes | None:
        parts, self._parts = self._parts, []
        return b"".join(parts) or None

    def failed(self, code: str, message: str) -> bytes:
        """Return what ends a stream that has begun."""
        self._parts = []
        body = self._shown.failed(self._answer_id, code, message)
        self._event("response.failed", response=msgspec.Raw(body))
        return self._parts[0] + DONE

    def _event(self, kind: str, **fields: Any) -> None:
        data = encode({"type": kind, "sequence_number": self._number, **fields})
        self._number += 1
        self._parts.append(b"event: %b\ndata: %b\n\n" % (kind.encode(), data))

    def _added(self, item: Item) -> None:
        name = item.pieces.encode()
        self._delta = _DELTA % (name, name, encode({**item.at, **item.more})[1:-1])
        self._event("response.output_item.added", output_index=item.index, item=item.shown())
        if (part := item.part("")) is not None:
            self._event("response.content_part.added", **item.at, part=part)

    def _grown(self, item: Item, text: str) -> None:
        if not item.pieces:
            return
        self._parts.append(self._delta + b'%d,"delta":%b}\n\n' % (self._number, encode(text)))
        self._number += 1

    def _done(self, item: Item) -> None:
        if item.pieces:
            self._event(f"{item.pieces}.done", **item.at, **item.done())
        if (part := item.part(item.text)) is not None:
            self._event("response.content_part.done", **item.at, part=part)
        self._event("response.output_item.done", output_index=item.index, item=item.shown())
