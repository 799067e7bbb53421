"""Values that a model writes as plain text: the schema says which JSON they become.

A string is escaped as it comes. A number's digits pass as they are. Only where the schema allows a
string and something else is a short value held back, until it can be nothing but a string.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from millstream_server.formats.finder import Finder
from millstream_server.formats.json_text import JsonValue, escape, escaped
from millstream_server.formats.reader import Sink
from millstream_server.formats.schema import ANY, Types

_WORDS = {"true": "true", "True": "true", "false": "false", "False": "false",
          "null": "null", "None": "null"}  # fmt: skip
_WORD_TYPES = {"true": "boolean", "false": "boolean", "null": "null"}
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_LITERAL = re.compile(r"\s*(?:[A-Za-z]{1,5}|[-+0-9.eE]+)?\s*")
_MOST_HELD = 512
_NESTED = frozenset(("object", "array"))
_NUMBERS = frozenset(("number", "integer"))


class PlainValue:
    """Makes JSON of one value's text; the caller finds its end."""

    __slots__ = ("_begun", "_held", "_json", "_mode", "_space", "_types")

    def __init__(self, types: Types) -> None:
        self._types = types
        self._held = ""
        self._space: list[str] = []
        """White space that came first."""
        self._json: JsonValue | None = None
        self._begun = False
        self._mode = _STRING if types == {"string"} else _UNKNOWN

    @property
    def nested(self) -> bool:
        """Whether JSON of several parts is read: then markers in its strings are no markers."""
        return self._json is not None and not self._json.done

    def begin(self, text: str, at: int) -> int:
        """Decide by the first characters how to read on, if they suffice; return from where."""
        if self._mode is not _UNKNOWN:
            return at
        start = at
        while start < len(text) and text[start].isspace():
            start += 1
        if start == len(text):
            return at
        self._decide(text[start])
        return at if self._mode is _MAYBE else start

    def _decide(self, char: str) -> None:
        types = self._types
        if (char == "{" and "object" in types) or (char == "[" and "array" in types):
            self._mode, self._json = _JSON, JsonValue()
        elif "string" in types:
            self._mode = _MAYBE
        elif char in "-0123456789" and types & _NUMBERS:
            self._mode = _NUMERAL
        elif char in '{["':
            self._mode, self._json = _JSON, JsonValue()
        else:
            self._mode = _MAYBE

    def nested_piece(self, text: str, at: int) -> tuple[str, int]:
        """While `nested`: return the next piece of the value, and up to where it goes."""
        if self._json is None:
            return "", at
        return self._json.take(text, at)

    def piece(self, text: str) -> str:
        """Return the JSON of more of the value; without what `nested_piece` has read."""
        mode = self._mode
        if mode is _STRING:
            if self._begun:
                return escaped(text)
            self._begun = True
            return escape(text)[:-1]
        if mode is _NUMERAL or mode is _JSON:
            return text
        if mode is _UNKNOWN:
            self._space.append(text)
            return ""
        self._held = self._behind_space() + text
        if mode is _MAYBE and not (
            len(self._held) <= _MOST_HELD and _LITERAL.fullmatch(self._held)
        ):
            self._mode, held, self._held = _STRING, self._held, ""
            return self.piece(held)
        return ""

    def _behind_space(self) -> str:
        """Return what is held back, with the white space before it."""
        space, self._space = self._space, []
        return "".join([*space, self._held]) if space else self._held

    def end(self) -> str:
        """Return the rest of the JSON, at the value's end."""
        if self._mode is _STRING:
            return '"' if self._begun else '""'
        if self._mode in (_NUMERAL, _JSON):
            return ""
        self._held = self._behind_space()
        word = self._held.strip()
        if not word and self._types <= _NESTED:
            return "{}" if "object" in self._types else "[]"
        as_json = _WORDS.get(word, "")
        if as_json and _WORD_TYPES[as_json] in self._types:
            return as_json
        number = _NUMBER.fullmatch(word) if self._types & _NUMBERS else None
        if number is not None and ("number" in self._types or not any(number.groups())):
            return word
        return escape(self._held)


_UNKNOWN, _MAYBE, _STRING, _NUMERAL, _JSON = object(), object(), object(), object(), object()


class PlainBody:
    """A `Body` of such values between markers. It reads in steps.

    A step gets the text, from where to read, and whether nothing follows; it returns up to where it
    has read.
    """

    __slots__ = ("_sink", "_step", "_value", "broken", "done")

    def __init__(self, sink: Sink, first: Callable[[str, int, bool], int]) -> None:
        self._sink = sink
        self._step = first
        self._value = PlainValue(ANY)
        self.done = self.broken = False

    def read(self, text: str, at: int, *, last: bool) -> int:
        """See `Body.read`."""
        end = len(text)
        while at < end and not self.done:
            before, step = at, self._step
            at = step(text, at, last)
            if at == before and step == self._step:
                break  # it is held back
        return at

    def _of_value(
        self, text: str, at: int, finder: Finder, *, last: bool
    ) -> tuple[str, int, re.Match[str] | None]:
        """Read on in the value; return its next piece, up to where, and the marker behind it."""
        value = self._value
        at = value.begin(text, at)
        if value.nested:
            return (*value.nested_piece(text, at), None)
        found = finder.find(text, at, last=last)
        end = len(text) if found is None else found.start()
        piece = value.piece(text[at:end]) if end > at else ""
        return piece, end, found if found is not None and found.group(1) is not None else None

    def _give(self, fragment: str) -> None:
        if fragment:
            self._sink.arguments(fragment)
