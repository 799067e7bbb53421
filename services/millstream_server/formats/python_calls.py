"""Calls written as Python's: a name, and arguments as literals in brackets."""

from __future__ import annotations

import re
from dataclasses import dataclass

from millstream_server.formats.literals import (
    LONGEST_WORD,
    Literals,
    LiteralsBody,
    behind_space,
)
from millstream_server.formats.reader import Sink
from millstream_server.formats.schema import Tools

_CALL = re.compile(r"(?P<name>[A-Za-z_][\w.-]*)\s*\(")
_CALL_BEGUN = re.compile(r"[A-Za-z_][\w.-]*\s*\Z")
_BARE = re.compile(r"\[\s{0,64}[A-Za-z_][\w.-]{0,128}\(")
_BARE_BEGUN = re.compile(r"\[\s{0,64}(?:[A-Za-z_][\w.-]{0,128})?\Z")
_PYTHON = Literals(quotes=("'''", '"""', "'", '"'), escapes=True, end=")")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PythonCalls:
    """Calls written as Python's, in a list or one behind the other."""

    bare: bool = False
    """An answer, and what follows a call, may be a list of calls without any marker before it."""

    def reader(self, sink: Sink, opener: str, tools: Tools) -> PythonReader:
        """Read calls behind the text ``opener``."""
        return PythonReader(sink, opener, tools)

    def begins(self, text: str, at: int) -> bool | None:
        """Return whether a list of calls begins; None: too little of it is there."""
        if _BARE.match(text, at):
            return True
        return None if _BARE_BEGUN.match(text, at) else False


class PythonReader:
    """Reads them."""

    __slots__ = (
        "_body",
        "_calls",
        "_known",
        "_listed",
        "_raw",
        "_sink",
        "_tools",
        "done",
        "rejected",
    )

    def __init__(self, sink: Sink, opener: str, tools: Tools) -> None:
        self._sink = sink
        self._tools = tools
        self._known = None if opener else tools
        """Without a marker only what names one of these tools is a call."""
        self._raw = [opener]
        """All that was read before the first call: there may be none."""
        self._calls = 0
        self._listed = False
        self._body: LiteralsBody | None = None
        self.done = False
        self.rejected: str | None = None

    def read(self, text: str, at: int, *, last: bool) -> int:
        """See `Reader.read`."""
        while at < len(text) and not self.done:
            body = self._body
            if body is not None:
                before = at
                at = body.read(text, at, last=last)
                if body.done:
                    self._end(cut=body.broken)
                elif at == before or at < len(text):
                    break
                continue
            read = self._between(text, at, last=last)
            if read is None:
                break
            if not self._calls:
                self._raw.append(text[at:read])
            at = read
        if self.done and not self._calls:
            self.rejected = "".join(self._raw)
        return at

    @property
    def in_json(self) -> bool:
        """See `Reader.in_json`."""
        return False

    def finish(self) -> None:
        """See `Reader.finish`."""
        self.done = True
        if self._body is not None:
            self._sink.cut_call()
        elif not self._calls:
            self.rejected = "".join(self._raw)

    def _between(self, text: str, at: int, *, last: bool) -> int | None:
        """Read what stands between two calls; return up to where. None: more text is needed."""
        at = behind_space(text, at)
        if at == len(text):
            return at
        char = text[at]
        if char == "[" and not (self._listed or self._calls):
            self._listed = True
        elif char == "]" and self._listed:
            self.done = True
        elif char != "," or not self._calls:
            found = _CALL.match(text, at)
            if found is not None and (self._known is None or self._known.has(found["name"])):
                self._calls += 1
                self._sink.start_call(found["name"], "")
                self._body = _PYTHON.body(self._sink, found["name"], self._tools)
                return found.end()
            begun = _CALL_BEGUN.match(text, at) if found is None else None
            if begun is not None and not last and len(text) - at <= LONGEST_WORD:
                return None
            self.done = True
            return at
        return at + 1

    def _end(self, *, cut: bool) -> None:
        self._body = None
        if cut:
            self.done = True
            self._sink.cut_call()
        else:
            self._sink.end_call()
