"""Reads a model's answer as it comes: reasoning, text and calls, in the order they were written.

One pass: what has been given out isn't looked at again, and what is held back is at most what may
become a marker. Whatever a model writes, nothing raises: what can't be read becomes text, or a call
that is marked incomplete.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence

from millstream_server.formats.calls import Calls
from millstream_server.formats.events import Event, Kind, Reasoning, Text
from millstream_server.formats.format import Format, Route, routes_of
from millstream_server.formats.reader import Reader
from millstream_server.formats.schema import Tools

_MOST_SPACE = 64
"""So much white space may stand before a call without a marker: it is held back."""
PIECE_CHARS = 1024
"""So much is read at once: readers may look for what they need in all that is there."""
_NO_TEXTS: Mapping[int, str] = {}


class Parser:
    """Reads one answer.

    Order of calls: `feed` any number of times, `finish` once. Later ones have no effect.
    """

    def __init__(
        self,
        form: Format,
        tools: Tools | None,
        *,
        prompt: str = "",
        begun: str = "",
        hidden: Mapping[int, str] = _NO_TEXTS,
        new_id: Callable[[str, int], str] | None = None,
    ) -> None:
        """Read an answer to ``prompt``, which may have begun the reasoning.

        ``tools``: None: there are none, and calls are text, markers and all.
        ``begun``: what the answer goes on in, or its beginning (`go_on`); it is read, and nothing
        of it is given out.
        ``hidden``: texts of the tokens of markers that the text doesn't show (`Format.hidden`).
        ``new_id`` makes the ids of calls whose model writes none; None: as the format has them.
        """
        self._form = form
        self._routes = routes_of(form, calls=tools is not None)
        self._tools = tools
        self._hidden = hidden
        self._calls = Calls(new_id or form.new_id)
        self.calls = self._calls.made
        """The calls, as far as they have come."""
        self._kind = Kind.TEXT
        self._in_section = False
        self._leads = False
        """Newlines are dropped that stand here, behind a marker."""
        self._bare_due = True
        """A call without a marker may begin here."""
        self._in_header = False
        """Text means nothing up to the next marker."""
        self._reader: Reader | None = None
        self._held = ""
        self._known = 0
        """So much of what is held back belongs to ``begun``."""
        self._base = 0
        """The place of the text in hand in the whole answer, in characters."""
        self._fed = 0
        self._counts = TokenCounts()
        self.tokens = self._counts.of_kind
        """How many tokens belong to each `Kind`."""
        self._over = False
        self.go_on(begun or form.opened_by(prompt))

    # ---- from the answer's owner

    def go_on(self, begun: str) -> None:
        """Read more of what the answer goes on in, before anything of its own."""
        self._known = 0
        self._fed += len(begun)
        self._run(self._held + begun, last=False)
        self._known = len(self._held)

    def fork(self, hidden: Mapping[int, str]) -> Parser:
        """Return a parser that has read the same; there may be no call so far."""
        other = copy.copy(self)
        other.renew(hidden)
        return other

    def renew(self, hidden: Mapping[int, str]) -> None:
        """Share nothing that changes with the parser that this is a copy of."""
        self._hidden = hidden
        self._calls = Calls(self._calls.new_id)
        self.calls = self._calls.made
        self._counts = TokenCounts()
        self.tokens = self._counts.of_kind

    @property
    def in_reasoning(self) -> bool:
        """Whether what follows is reasoning, if no marker comes."""
        return self._kind is Kind.REASONING

    @property
    def has_calls(self) -> bool:
        """Whether a call has come, or the beginning of one."""
        return bool(self.calls) or self._reader is not None

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
            self._counts.pending.append((self._fed, len(ids)))
        if len(text) > PIECE_CHARS:
            for start in range(0, len(text), PIECE_CHARS):
                cut += self.feed(text[start : start + PIECE_CHARS])
            return cut
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
        self._calls.events = []
        self._reader = None
        reader.finish()
        self._leads = self._bare_due = True
        return self._calls.events

    def _run(self, text: str, *, last: bool) -> list[Event]:
        events: list[Event] = []
        self._calls.events = events
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
        if self._counts.pending:
            self._settle(self._fed + 1 if at == end else self._base + at)
        return events

    def _read_region(self, text: str, at: int, *, last: bool) -> int:
        """Read text or reasoning up to a marker; return up to where."""
        if self._leads:
            dropped = "" if not self._form.newlines else " \t\r\n" if self._in_section else "\r\n"
            start = at
            while start < len(text) and text[start] in dropped:
                start += 1
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

    def _bare_call(self, text: str, at: int, *, last: bool) -> int | None:
        """Return where to go on if a call begins, or may begin, without a marker."""
        style = self._form.call
        tools = self._tools
        if style is None or not style.bare or self._kind is not Kind.TEXT or tools is None:
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
        self._reader = style.reader(self._calls, "", tools)
        return start

    def _follow(self, route: Route, marker: str, start: int, end: int) -> None:
        """Do what a marker says, which stands from ``start`` to ``end``."""
        self._in_header = route is Route.HEADER
        if self._tools is None:
            self._in_section = route is Route.CALL or route is Route.SECTION
            if self._in_section or route is Route.SECTION_END:
                self._give(marker)
                return
        self._known = 0
        opens = route is Route.REASON or route is Route.CALL
        self._settle(self._base + (start if opens or self._kind is Kind.TEXT else end))
        if route is Route.CALL:
            if self._form.call is not None and self._tools is not None:
                self._reader = self._form.call.reader(self._calls, marker, self._tools)
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
        """Count the tokens whose text begins before ``upto``; None: as what is read just now."""
        if self._counts.pending:
            if kind is None:
                kind = self._kind if self._reader is None else Kind.CALL
            self._counts.settle(upto, kind)

    def _give(self, text: str) -> None:
        if self._known:
            known, self._known = self._known, max(0, self._known - len(text))
            text = text[known:]
        if text:
            self._calls.events.append(Text(text) if self._kind is Kind.TEXT else Reasoning(text))


class TokenCounts:
    """Counts an answer's tokens by what the first character of each belongs to."""

    __slots__ = ("of_kind", "pending")

    def __init__(self) -> None:
        self.of_kind = [0, 0, 0]
        self.pending: list[tuple[int, int]] = []
        """Tokens that belong to no `Kind` yet: where their text begins, and how many."""

    def settle(self, upto: int, kind: Kind) -> None:
        """Count those whose text begins before ``upto`` as being of a kind."""
        settled = 0
        for start, count in self.pending:
            if start >= upto:
                break
            self.of_kind[kind] += count
            settled += 1
        del self.pending[:settled]
