"""Reads a model's answer as it comes: reasoning, text and calls, in the order they were written.

One pass: what has been given out isn't looked at again, and what is held back is at most what may
become a marker. Whatever a model writes, nothing raises: what can't be read becomes text, or a call
that is marked incomplete.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from millstream_server.formats.events import (
    Arguments,
    CallEnd,
    CallStart,
    Event,
    Kind,
    Reasoning,
    Text,
)
from millstream_server.formats.format import Format, Route, routes_of
from millstream_server.formats.reader import Reader
from millstream_server.formats.schema import Tools

_MOST_SPACE = 64
"""So much white space may stand before a call without a marker: it is held back."""
_NO_TEXTS: Mapping[int, str] = {}


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


class Parser:
    """Reads one answer; a `Sink` of the readers of its calls.

    Order of calls: `feed` any number of times, `finish` once. Later ones have no effect.
    """

    def __init__(
        self,
        form: Format,
        tools: Tools,
        *,
        prompt: str = "",
        hidden: Mapping[int, str] = _NO_TEXTS,
        new_id: Callable[[str, int], str] | None = None,
    ) -> None:
        """Read an answer to ``prompt``, which may have begun the reasoning.

        ``hidden``: texts of the tokens of markers that the text doesn't show (`Format.hidden`).
        ``new_id`` makes the ids of calls whose model writes none; None: as the format has them.
        """
        self._form = form
        self._routes = routes_of(form)
        self._tools = tools
        self._hidden = hidden
        self._new_id = new_id or form.new_id
        self.calls: list[Call] = []
        self.tokens = [0, 0, 0]
        """How many tokens belong to each `Kind`."""
        self._kind = Kind.TEXT
        self._in_section = False
        self._leads = False
        """Newlines are dropped that stand here, behind a marker."""
        self._bare_due = True
        """A call without a marker may begin here."""
        self._in_header = False
        """Text means nothing up to the next marker."""
        self._reader: Reader | None = None
        self._events: list[Event] = []
        self._held = ""
        self._base = 0
        """The place of the text in hand in the whole answer, in characters."""
        self._fed = 0
        self._pending: list[tuple[int, int]] = []
        """Tokens that belong to no `Kind` yet: where their text begins, and how many."""
        self._over = False
        opened = form.opened_by(prompt)
        self._fed = len(opened)
        self._run(opened, last=False)

    # ---- from the answer's owner

    def feed(self, text: str, ids: Sequence[int] = ()) -> list[Event]:
        """Take more of the answer; return what it brings.

        ``ids`` are the tokens of ``text``. They are counted exactly, and those that the text
        doesn't show are seen, if each comes alone.
        """
        if self._over:
            return []
        cut: list[Event] = []
        if self._hidden and len(ids) == 1 and (marker := self._hidden.get(ids[0])) is not None:
            text += marker
            cut = self._cut_json()
        if ids:
            self._pending.append((self._fed, len(ids)))
        self._fed += len(text)
        events = self._run(self._held + text, last=False)
        return [*cut, *events] if cut else events

    def finish(self) -> list[Event]:
        """End the answer; return what was held back."""
        if self._over:
            return []
        events = self._run(self._held, last=True)
        if self._reader is not None:
            reader, self._reader = self._reader, None
            reader.finish()
            if reader.rejected is not None:
                self._give(reader.rejected + self._held)
        elif self._held:
            self._give(self._held)
        self._held = ""
        self._settle(self._fed + 1)
        self._over = True
        return events

    # ---- reading

    def _cut_json(self) -> list[Event]:
        """End a call in the middle of its JSON, since a token came that is never a part of it."""
        reader = self._reader
        if reader is None or not reader.in_json:
            return []
        self._events = []
        self._reader = None
        reader.finish()
        self._leads = self._bare_due = True
        return self._events

    def _run(self, text: str, *, last: bool) -> list[Event]:
        events: list[Event] = []
        self._events = events
        self._base = self._fed - len(text)
        at, end = 0, len(text)
        while at < end:
            reader, before = self._reader, at
            if reader is None:
                at = self._read_region(text, at, last=last)
            else:
                at = reader.read(text, at, last=last)
                if reader.done:
                    self._leave(reader, at)
            if at == before and reader is self._reader:
                break  # the rest is held back
        self._held = text[at:]
        if self._pending:
            self._settle(self._fed + 1 if at == end else self._base + at)
        return events

    def _read_region(self, text: str, at: int, *, last: bool) -> int:
        """Read text or reasoning up to a marker; return up to where."""
        if self._leads:
            start = self._behind_newlines(text, at) if self._form.newlines else at
            if start == len(text):
                return start
            self._leads, at = False, start
        if self._bare_due and (begun := self._bare_call(text, at, last=last)) is not None:
            return begun
        routes = self._routes
        finder = routes.inside if self._in_section else routes.outside
        found = finder.find(text, at, last=last)
        start = len(text) if found is None else found.start()
        if start > at and not self._in_header:
            self._give(text[at:start])
        if found is None:
            return start
        marker: str | None = found.group(1)
        if marker is None:
            return start
        self._follow(routes.actions[marker], found.group(), start, found.end())
        return found.end()

    def _behind_newlines(self, text: str, at: int) -> int:
        dropped = " \t\r\n" if self._in_section else "\r\n"
        end = len(text)
        while at < end and text[at] in dropped:
            at += 1
        return at

    def _bare_call(self, text: str, at: int, *, last: bool) -> int | None:
        """Return where to go on if a call begins, or may begin, without a marker."""
        style = self._form.call
        if style is None or not style.bare or self._kind is not Kind.TEXT:
            self._bare_due = False
            return None
        start = at
        while start < len(text) and text[start].isspace():
            start += 1
        if start - at > _MOST_SPACE:
            begins: bool | None = False
        else:
            begins = style.begins(text, start) if start < len(text) else None
        if begins is None and not last:
            return at  # too little to know
        self._bare_due = False
        if not begins:
            return None
        self._settle(self._base + start)
        self._reader = style.reader(self, "", self._tools)
        return start

    def _follow(self, route: Route, marker: str, start: int, end: int) -> None:
        """Do what a marker says, which stands from ``start`` to ``end``."""
        self._in_header = route is Route.HEADER
        opens = route is Route.REASON or route is Route.CALL
        self._settle(self._base + (start if opens or self._kind is Kind.TEXT else end))
        if route is Route.CALL:
            if self._form.call is not None:
                self._reader = self._form.call.reader(self, marker, self._tools)
            return
        if route is Route.REASON:
            self._kind = Kind.REASONING
        elif route is Route.TEXT:
            self._kind = Kind.TEXT
        elif route is Route.SECTION:
            self._in_section = True
        elif route is Route.SECTION_END:
            self._in_section = False
        self._leads = self._bare_due = True
        self._settle(self._base + end, Kind.CALL if self._kind is Kind.TEXT else self._kind)

    def _leave(self, reader: Reader, at: int) -> None:
        """Go on behind calls, or with what turned out to be none."""
        self._reader = None
        if reader.rejected is not None:
            self._give(reader.rejected)
            self._settle(self._base + at)
            return
        self._settle(self._base + at, Kind.CALL)
        self._leads = self._bare_due = True

    def _settle(self, upto: int, kind: Kind | None = None) -> None:
        """Count the tokens whose text begins before ``upto``, as being of a kind."""
        pending = self._pending
        if not pending:
            return
        if kind is None:
            kind = self._kind if self._reader is None else Kind.CALL
        settled = 0
        for start, count in pending:
            if start >= upto:
                break
            self.tokens[kind] += count
            settled += 1
        del pending[:settled]

    # ---- what is read

    def _give(self, text: str) -> None:
        if text:
            self._events.append(Text(text) if self._kind is Kind.TEXT else Reasoning(text))

    def start_call(self, name: str, call_id: str) -> None:
        """See `Sink.start_call`."""
        call = Call(name, call_id or self._new_id(name, len(self.calls)))
        self._events.append(CallStart(len(self.calls), call.id, name))
        self.calls.append(call)

    def arguments(self, fragment: str) -> None:
        """See `Sink.arguments`."""
        self.calls[-1].fragments.append(fragment)
        self._events.append(Arguments(len(self.calls) - 1, fragment))

    def end_call(self) -> None:
        """See `Sink.end_call`."""
        call = self.calls[-1]
        call.ended = True
        call.incomplete = not _is_object(call.arguments_json)
        self._events.append(CallEnd(len(self.calls) - 1, call.incomplete))

    def cut_call(self) -> None:
        """See `Sink.cut_call`."""
        self.calls[-1].ended = True
        self._events.append(CallEnd(len(self.calls) - 1, incomplete=True))


def _is_object(text: str) -> bool:
    """Return whether it is a JSON object; numbers aren't converted, which could take long."""
    try:
        value: Any = json.loads(text, parse_int=str, parse_float=str)
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict)
