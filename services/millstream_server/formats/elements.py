"""Arguments written as nested elements that say their own types."""

from __future__ import annotations

import functools
import html
import re
from dataclasses import dataclass

from millstream_server.formats.finder import Finder
from millstream_server.formats.json_text import escape
from millstream_server.formats.plain_value import PlainBody, PlainValue
from millstream_server.formats.reader import Body, Sink
from millstream_server.formats.schema import NOT_STRING, STRING, Tools

_LONGEST_TAG = 512
_MOST_NESTED = 128
_NESTED = {"dict": ("{", "}"), "list": ("[", "]")}
_ATTRIBUTE = re.compile(r'(\w+)="([^"]*)"')


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Elements:
    """How they are written: ``name`` and ``type`` (raw, json, dict, list) are attributes."""

    open: str
    close: str
    end: str
    """What ends the arguments."""

    def body(self, sink: Sink, name: str, tools: Tools) -> Body:
        """Read the arguments of a call."""
        return ElementsBody(self, sink)


class ElementsBody(PlainBody):
    """Makes a JSON object of them."""

    __slots__ = ("_between_finder", "_counts", "_ends", "_style", "_text_finder")

    def __init__(self, style: Elements, sink: Sink) -> None:
        super().__init__(sink, self._between)
        self._style = style
        self._between_finder, self._text_finder = _finders(style)
        self._ends = ["}"]
        """The ends in JSON of what is open."""
        self._counts = [0]
        """How many parts each has so far."""

    # ---- the steps

    def _between(self, text: str, at: int, last: bool) -> int:  # noqa: FBT001 (a step)
        found = self._between_finder.find(text, at, last=last)
        if found is None:
            return len(text)
        marker: str | None = found.group(1)
        if marker is None:
            return found.start()
        if marker == self._style.open:
            self._step = self._tag
        elif marker == self._style.close:
            if len(self._ends) > 1:
                self._pop()
        else:
            self.done, self.broken = True, len(self._ends) > 1
            if not self.broken:
                self._pop()
        return found.end()

    def _tag(self, text: str, at: int, last: bool) -> int:  # noqa: FBT001 (a step)
        end = text.find(">", at)
        if (len(text) if end < 0 else end) - at > _LONGEST_TAG or len(self._ends) > _MOST_NESTED:
            self.done = self.broken = True
        if end < 0 or self.done:
            return at
        attributes = {key: html.unescape(value) for key, value in _ATTRIBUTE.findall(text, at, end)}
        divider = ", " if self._counts[-1] else "{" if len(self._ends) == 1 else ""
        key = "" if self._ends[-1] == "]" else f"{escape(attributes.get('name', ''))}: "
        self._counts[-1] += 1
        kind = attributes.get("type", "raw")
        begin, close = _NESTED.get(kind, ("", ""))
        self._sink.arguments(divider + key + begin)
        if close:
            self._ends.append(close)
            self._counts.append(0)
            self._step = self._between
        else:
            self._value = PlainValue(STRING if kind == "raw" else NOT_STRING)
            self._step = self._text
        return end + 1

    def _text(self, text: str, at: int, last: bool) -> int:  # noqa: FBT001 (a step)
        piece, end, found = self._of_value(text, at, self._text_finder, last=last)
        self._give(piece)
        if found is None:
            return end
        self._give(self._value.end())
        self._step = self._between
        return found.end() if found.group(1) == self._style.close else end

    def _pop(self) -> None:
        count = self._counts.pop()
        end = self._ends.pop()
        self._sink.arguments("{}" if not (self._ends or count) else end)


@functools.cache
def _finders(style: Elements) -> tuple[Finder, Finder]:
    between = Finder((style.open, style.close, style.end))
    return between, Finder((style.close, style.end))
