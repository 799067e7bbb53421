"""JSON as models write it, passed on as it comes: never parsed, so numbers keep their digits.

What no JSON string may have is escaped: control characters, and backslashes that escape nothing.
"""

from __future__ import annotations

import json
import re

from millstream_server.formats.reader import Sink

escape = json.encoder.encode_basestring
"""Returns a text as a JSON string, with its quotes."""

_IN_STRING = re.compile(r'["\\\x00-\x1f]')
_OUTSIDE = re.compile(r'["{}\[\]<`]')
_ESCAPES = frozenset('"\\/bfnrtu')
SPACE = re.compile(r"\s*")


def escaped(text: str) -> str:
    """Return what stands for ``text`` inside a JSON string."""
    return escape(text)[1:-1]


def unquoted(raw: str) -> str:
    """Return what the inside of a JSON string stands for; itself if it is malformed."""
    try:
        text: str = json.loads(f'"{raw}"', strict=False)
    except ValueError:
        return raw
    return text


class JsonValue:
    """Passes one object, array or string through, and knows where it ends."""

    __slots__ = ("_depth", "_escaping", "_in_string", "broken", "done")

    def __init__(self) -> None:
        """Begin before the value's first character."""
        self._depth = 0
        self._in_string = False
        self._escaping = False
        self.done = False
        self.broken = False
        """When ``done``: a marker came before its end."""

    def take(self, text: str, at: int) -> tuple[str, int]:
        """Return the next piece of the value, and up to where ``text`` belongs to it."""
        parts: list[str] = []
        start, end = at, len(text)
        while at < end and not self.done:
            if not self._in_string:
                at = self._outside(text, at)
            elif self._escaping:
                self._escaping = False
                if text[at] not in _ESCAPES:
                    parts += (text[start:at], "\\")
                    start = at
                    continue
                at += 1
            else:
                found = _IN_STRING.search(text, at)
                if found is None:
                    at = end
                    break
                at = found.end()
                char = found.group()
                if char == "\\":
                    self._escaping = True
                elif char == '"':
                    self._in_string = False
                    self.done = not self._depth
                else:
                    parts += (text[start : at - 1], escaped(char))
                    start = at
        if not parts:
            return text[start:at], at
        return "".join([*parts, text[start:at]]), at

    def _outside(self, text: str, at: int) -> int:
        found = _OUTSIDE.search(text, at)
        if found is None:
            return len(text)
        char = found.group()
        if char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            self.done = self._depth <= 0
        else:
            self.done = self.broken = True
            return found.start()
        return found.end()


class EncodedValue:
    """Passes on what a JSON string has in it: arguments that a model has encoded twice."""

    __slots__ = ("_held", "done")

    broken = False

    def __init__(self) -> None:
        """Begin behind the opening quote."""
        self._held = ""
        """The beginning of an escape."""
        self.done = False

    def take(self, text: str, at: int) -> tuple[str, int]:
        """Return the next piece of what is encoded, and up to where ``text`` belongs to it."""
        raw, before = self._held + text[at:], len(self._held)
        units = _UNITS.match(raw)
        read = units.end() if units else 0
        if raw[read : read + 1] == '"':
            self.done, self._held = True, ""
            return unquoted(raw[:read]), at + read + 1 - before
        if len(raw) - read > _LONGEST_ESCAPE:
            read += 1  # a backslash that escapes nothing
            self._held = ""
            return unquoted(raw[:read]), at + read - before
        self._held = raw[read:]
        return unquoted(raw[:read]), len(text)


_UNITS = re.compile(
    r'(?:[^\\"]++|\\[^u]|\\u(?![dD][89abAB])[0-9a-fA-F]{4}'
    r"|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[0-9a-fA-F]{4})*+",
    re.DOTALL,
)
_LONGEST_ESCAPE = 12


class JsonBody:
    """Arguments written as a JSON object; without any, an empty one."""

    __slots__ = ("_sink", "_value", "broken", "done")

    def __init__(self, sink: Sink) -> None:
        """Give the arguments to ``sink``."""
        self._sink = sink
        self._value: JsonValue | None = None
        self.done = self.broken = False

    @property
    def begun(self) -> bool:
        """Whether the object has begun."""
        return self._value is not None

    def read(self, text: str, at: int, *, last: bool) -> int:
        """See `Body.read`."""
        if self._value is None:
            at = _space_end(text, at)
            if at == len(text):
                return at
            if text[at] != "{":
                self.done, self.broken = True, text[at] not in "<`"
                if not self.broken:
                    self._sink.arguments("{}")
                return at
            self._value = JsonValue()
        fragment, at = self._value.take(text, at)
        if fragment:
            self._sink.arguments(fragment)
        self.done, self.broken = self._value.done, self._value.broken
        return at


def _space_end(text: str, at: int) -> int:
    found = SPACE.match(text, at)
    return at if found is None else found.end()
