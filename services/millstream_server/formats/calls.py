"""The calls of an answer, and the events of an answer in the order in which they came."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable

import msgspec

from millstream_server.formats.events import Arguments, CallEnd, CallStart, Event

_MOST_PIECES = 4096
_SHORT_CHARS = 64 << 10


def add_piece(pieces: list[str], piece: str) -> None:
    """Add to a text that is kept in pieces; some 60 bytes for each token would be too much."""
    pieces.append(piece)
    if len(pieces) > _MOST_PIECES:
        pieces[:] = ("".join(pieces),)


class Call:
    """A call as far as it has come."""

    __slots__ = ("ended", "fragments", "id", "incomplete", "name")

    def __init__(self, name: str, call_id: str) -> None:
        self.name = name
        self.id = call_id
        self.fragments: list[str] = []
        self.ended = False
        self.incomplete = True

    @property
    def arguments_json(self) -> str:
        return "".join(self.fragments)


class Calls:
    """A `Sink` of the readers of calls: keeps them, and makes their events."""

    __slots__ = ("events", "made", "new_id")

    def __init__(self, new_id: Callable[[str, int], str]) -> None:
        """``new_id`` makes the ids of calls whose model writes none."""
        self.new_id = new_id
        self.made: list[Call] = []
        self.events: list[Event] = []
        """Since the parser has taken the last ones."""

    def start_call(self, name: str, call_id: str) -> None:
        """See `Sink.start_call`."""
        call = Call(name, call_id or self.new_id(name, len(self.made)))
        self.events.append(CallStart(len(self.made), call.id, name))
        self.made.append(call)

    def arguments(self, fragment: str) -> None:
        """See `Sink.arguments`."""
        add_piece(self.made[-1].fragments, fragment)
        self.events.append(Arguments(len(self.made) - 1, fragment))

    def end_call(self) -> None:
        """See `Sink.end_call`."""
        call = self.made[-1]
        call.ended = True
        call.incomplete = not _is_object(call.arguments_json)
        self.events.append(CallEnd(len(self.made) - 1, call.incomplete))

    def cut_call(self) -> None:
        """See `Sink.cut_call`."""
        self.made[-1].ended = True
        self.events.append(CallEnd(len(self.made) - 1, incomplete=True))


class _Object(msgspec.Struct):
    """Any object: its fields are read over, and no value is made."""


_OBJECT = msgspec.json.Decoder(_Object)


def _is_object(text: str) -> bool:
    """Return whether it is a JSON object: 1 MB takes 1.5 ms.

    Short ones may have what few readers take: half a pair of surrogates, NaN.
    """
    with contextlib.suppress(msgspec.DecodeError, ValueError, RecursionError):
        _OBJECT.decode(text)
        return True
    with contextlib.suppress(ValueError, RecursionError):
        if len(text) <= _SHORT_CHARS:
            return isinstance(json.loads(text, parse_int=str, parse_float=str), dict)
    return False
