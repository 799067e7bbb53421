"""Calls with a header, which has the name, and a body, which has the arguments."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

from millstream_server.formats.elements import Elements
from millstream_server.formats.finder import Finder
from millstream_server.formats.json_text import JsonBody
from millstream_server.formats.key_values import KeyValues
from millstream_server.formats.literals import Literals
from millstream_server.formats.markup import Markup
from millstream_server.formats.reader import Body, Sink
from millstream_server.formats.schema import Tools

NAME = r"\s*(?P<name>[^\s<>\"{}\[\]|]+)\s*"
LONGEST_HEADER = 512


@dataclass(frozen=True, slots=True, eq=False)
class Json:
    """The arguments are a JSON object."""

    def body(self, sink: Sink, name: str, tools: Tools) -> Body:
        return JsonBody(sink)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tagged:
    """How such a call is written."""

    header_end: tuple[str, ...]
    """What stands behind the header."""
    arguments: Json | KeyValues | Literals | Markup | Elements
    header: str = NAME
    """A pattern of the header, with the group ``name`` and, if the model writes ids, ``id``."""
    keeps_end: bool = False
    """What ends the header belongs to the arguments."""

    bare = False

    def reader(self, sink: Sink, opener: str, tools: Tools) -> TaggedReader:
        """Read a call behind the text ``opener``."""
        return TaggedReader(self, sink, opener, tools)

    def begins(self, text: str, at: int) -> bool | None:
        """Return False: each call has a marker."""
        return False


class TaggedReader:
    """Reads one such call."""

    __slots__ = ("_body", "_opener", "_sink", "_style", "_tools", "done", "rejected")

    def __init__(self, style: Tagged, sink: Sink, opener: str, tools: Tools) -> None:
        self._style = style
        self._sink = sink
        self._opener = opener
        self._tools = tools
        self._body: Body | None = None
        """None: the header is read."""
        self.done = False
        self.rejected: str | None = None

    def read(self, text: str, at: int, *, last: bool) -> int:
        """See `Reader.read`."""
        body = self._body
        if body is None:
            at = self._read_header(text, at, last=last)
            body = self._body
            if body is None:
                return at
        at = body.read(text, at, last=last)
        if body.done:
            self.done = True
            if body.broken:
                self._sink.cut_call()
            else:
                self._sink.end_call()
        return at

    @property
    def in_json(self) -> bool:
        """See `Reader.in_json`."""
        return isinstance(self._body, JsonBody) and self._body.begun

    def finish(self) -> None:
        """See `Reader.finish`."""
        self.done = True
        if self._body is None:
            self.rejected = self._opener
        else:
            self._sink.cut_call()

    def _read_header(self, text: str, at: int, *, last: bool) -> int:
        style = self._style
        end, header = _compiled(style)
        found = end.find(text, at, last=last)
        if found is None or found.group(1) is None:
            self.done = len(text) - at > LONGEST_HEADER
            if self.done:
                self.rejected = self._opener
            return at
        read = header.fullmatch(text, at, found.start())
        if read is None or found.start() - at > LONGEST_HEADER:
            self.done, self.rejected = True, self._opener
            return at
        groups = read.groupdict()
        name = groups["name"]
        self._sink.start_call(name, groups.get("id") or "")
        self._body = style.arguments.body(self._sink, name, self._tools)
        return found.start() if style.keeps_end else found.end()


@functools.cache
def _compiled(style: Tagged) -> tuple[Finder, re.Pattern[str]]:
    return Finder(style.header_end), re.compile(style.header, re.DOTALL)
