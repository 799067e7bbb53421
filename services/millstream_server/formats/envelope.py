"""Calls written as JSON objects that have the name and the arguments: one, several, or an array."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from millstream_server.formats.json_text import SPACE, EncodedValue, JsonValue, unquoted
from millstream_server.formats.reader import Sink
from millstream_server.formats.schema import Tools

_STRING_END = re.compile(r'((?:[^"\\]|\\.)*)"', re.DOTALL)
_SCALAR_END = re.compile(r"[,}\]\s<]")
_LONGEST_STRING = 1024
_BARE = '{"name"'
_LONGEST_BARE = 64
"""With white space in it."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Envelope:
    """The keys of such an object. A model may write any of ``name`` and so on, but one."""

    name: tuple[str, ...] = ("name",)
    arguments: tuple[str, ...] = ("arguments", "parameters")
    id: tuple[str, ...] = ()
    keyed: bool = False
    """The object has one key, the name; its value are the arguments."""
    bare: bool = False
    """An answer, and what follows a call, may be a call without any marker before it."""

    def reader(self, sink: Sink, opener: str, tools: Tools) -> EnvelopeReader:
        """Read calls behind the text ``opener``."""
        return EnvelopeReader(self, sink, opener, tools)

    def begins(self, text: str, at: int) -> bool | None:
        """Return whether a call without a marker begins; None: too little of it is there."""
        seen = "".join(text[at : at + _LONGEST_BARE].split())[: len(_BARE)]
        if seen == _BARE:
            return True
        return None if _BARE.startswith(seen) and len(text) - at < _LONGEST_BARE else False


class EnvelopeReader:
    """Reads them character by character, except for the arguments."""

    __slots__ = ("_array", "_call", "_calls", "_key", "_known", "_nested", "_other", "_raw",
                 "_rejects", "_sink", "_step", "_style", "_value", "done", "rejected")  # fmt: skip

    def __init__(self, style: Envelope, sink: Sink, opener: str, tools: Tools) -> None:
        self._style = style
        self._sink = sink
        self._known = None if opener else tools
        """Without a marker only what names one of these tools is a call."""
        self._raw = [opener]
        """All that was read since the last call, until a name was found: it may be no call."""
        self._rejects = False
        self._array = False
        self._calls = 0
        self._key = ""
        self._other = JsonValue()
        """The value of a key without meaning."""
        self._step: Callable[[str, int], int | None] = self._before
        self.done = False
        self.rejected: str | None = None
        self._open()

    def _open(self) -> None:
        self._call = _OpenCall(self._sink)
        self._value: JsonValue | EncodedValue | None = None
        """The arguments."""
        self._nested = False
        """Inside of an object's "function"."""

    def read(self, text: str, at: int, *, last: bool) -> int:
        """See `Reader.read`."""
        while not self.done and at < len(text):
            before = at
            if self._step != self._arguments:  # their spaces are theirs
                space = SPACE.match(text, at)
                at = space.end() if space else at
            if at < len(text):
                read = self._step(text, at)
                if read is None:
                    return before
                at = read
            if not self._call.begun:
                self._raw.append(text[before:at])
        if self._rejects:
            self.rejected = "".join(self._raw)
        return at

    @property
    def in_json(self) -> bool:
        """See `Reader.in_json`."""
        return self._step in (self._arguments, self._skipped)

    def finish(self) -> None:
        """See `Reader.finish`."""
        self.done = True
        self._break(0)
        if self._rejects:
            self.rejected = "".join(self._raw)

    # ---- the steps: each returns up to where it has read; None: it needs more text

    def _before(self, text: str, at: int) -> int | None:
        """Read what stands before an object."""
        char = text[at]
        if char == "{":
            self._open()
            self._step = self._keys
        elif char == "[" and not (self._array or self._calls):
            self._array = True
        elif char == "]" and self._array:
            self.done = True
        elif char not in ",;" or not self._calls:
            self.done, self._rejects = True, not self._calls
            return at
        return at + 1

    def _keys(self, text: str, at: int) -> int | None:
        char = text[at]
        if char == '"':
            key, end = self._string(text, at)
            if key is not None:
                self._key, self._step = key, self._colon
            return end
        if char == "}":
            if self._nested:
                self._nested = False
            else:
                self._close()
        elif char != ",":
            return self._break(at)
        return at + 1

    def _colon(self, text: str, at: int) -> int | None:
        if text[at] != ":":
            return self._break(at)
        self._step = self._meet_value
        return at + 1

    def _meet_value(self, text: str, at: int) -> int | None:
        style, key, char = self._style, self._key, text[at]
        if style.keyed and not self._call.name:
            self._call.name = key
        if style.keyed or key in style.arguments:
            return self._meet_arguments(text, at)
        if key == "function" and char == "{":
            self._nested, self._step = True, self._keys
            return at + 1
        if key in (*style.name, *style.id, "function") and char == '"':
            found, end = self._string(text, at)
            if found is None:
                return end
            if key in style.id:
                self._call.id = found
            else:
                self._call.name = found
            self._step = self._keys
            return end
        if char in '{["':
            self._other, self._step = JsonValue(), self._skipped
            return at
        return self._scalar(text, at)

    def _string(self, text: str, at: int) -> tuple[str | None, int | None]:
        """Return a short string, None if it is none or not whole; and up to where it goes."""
        read = _STRING_END.match(text, at + 1)
        if (len(text) if read is None else read.end()) - at > _LONGEST_STRING:
            return None, self._break(at)
        return (None, None) if read is None else (unquoted(read.group(1)), read.end())

    def _scalar(self, text: str, at: int) -> int | None:
        read = _SCALAR_END.search(text, at)
        if (len(text) if read is None else read.start()) - at > _LONGEST_STRING:
            return self._break(at)
        if read is None:
            return None
        self._step = self._keys
        return read.start() if read.start() > at else self._break(at)

    def _skipped(self, text: str, at: int) -> int | None:
        value = self._other
        _, at = value.take(text, at)
        if value.broken:
            return self._break(at)
        if value.done:
            self._step = self._keys
        return at

    def _meet_arguments(self, text: str, at: int) -> int | None:
        char = text[at]
        if self._is_call():
            self._call.start()
        if char == '"':
            self._value, at = EncodedValue(), at + 1
        elif char in "{[":
            self._value = JsonValue()
        else:
            read = self._scalar(text, at)
            if read is not None and not self.done and text[at:read] == "null":
                self._call.give("{}")
            elif read is not None:
                self._call.give(text[at:read])
            return read
        self._step = self._arguments
        return at

    def _arguments(self, text: str, at: int) -> int | None:
        value = self._value
        if value is None:  # never: `_meet_arguments` has set it
            return self._break(at)
        fragment, at = value.take(text, at)
        self._call.give(fragment)
        if value.broken:
            return self._break(at)
        if value.done:
            self._step = self._keys
        return at

    # ---- to the sink

    def _is_call(self) -> bool:
        name = self._call.name
        return bool(name) and (self._known is None or self._known.has(name))

    def _close(self) -> None:
        """End an object: a call, if it has a name."""
        if not self._is_call():
            self.done = self._rejects = True
            return
        self._calls += 1
        self._step = self._before
        self._call.end()
        self._open()
        self._raw = []

    def _break(self, at: int) -> int:
        """End within an object: it is malformed, or a marker came."""
        self.done = True
        if self._is_call():
            self._call.start()
            if self._value is not None and self._value.done and not self._value.broken:
                self._sink.end_call()  # only what has no meaning is missing
            else:
                self._sink.cut_call()
            self._open()
        else:
            self._rejects = not self._calls
        return at


class _OpenCall:
    """The call of one object, whose name may come behind its arguments."""

    __slots__ = ("_early", "_sink", "begun", "id", "name")

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self.name = self.id = ""
        self.begun = False
        """Its start was given to the sink."""
        self._early: list[str] = []
        """Arguments that came before the name."""

    def start(self) -> None:
        """Give the call's start to the sink, once, and what came before it."""
        if self.begun:
            return
        self.begun = True
        self._sink.start_call(self.name, self.id)
        for fragment in self._early:
            self._sink.arguments(fragment)

    def give(self, fragment: str) -> None:
        """Give a piece of the arguments to the sink, as soon as it can be."""
        if self.begun:
            if fragment:
                self._sink.arguments(fragment)
        elif fragment:
            self._early.append(fragment)

    def end(self) -> None:
        """End the call, which may have had no arguments."""
        if not self.begun:
            self.give("" if self._early else "{}")
            self.start()
        self._sink.end_call()
