"""Arguments written one by one, as a key and a value between markers."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from millstream_server.formats.finder import Finder
from millstream_server.formats.json_text import escape
from millstream_server.formats.plain_value import PlainBody, PlainValue
from millstream_server.formats.reader import Body, Sink
from millstream_server.formats.schema import ANY, NOT_STRING, STRING, Schema, Tools, Types

_LONGEST_KEY = 512
_BY_ATTRIBUTE: dict[str, Types] = {"string": STRING, "json": NOT_STRING, "any": ANY}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KeyValues:
    """How they are written."""

    key: str
    """What stands before a key."""
    key_end: tuple[str, ...]
    """What stands behind a key."""
    value: str = ""
    """What stands before a value; empty: it follows the key."""
    value_end: tuple[str, ...]
    """What stands behind a value."""
    end: tuple[str, ...]
    """What ends the arguments."""
    early_value_end: tuple[str, ...] = ()
    """What ends a value, too, where a model forgets the right marker; it is read again."""
    early_end: tuple[str, ...] = ()
    """Likewise of the arguments."""
    types: tuple[str, ...] = ()
    """For each of ``key_end`` what it says: "string", "json", "any". Empty: the schema does."""
    newline: bool = False
    """One newline at each end of a value is not part of it."""

    def body(self, sink: Sink, name: str, tools: Tools) -> Body:
        """Read the arguments of a call of the tool ``name``."""
        return KeyValuesBody(self, sink, tools.schema(name))


class _Finders:
    """The markers of each step."""

    def __init__(self, style: KeyValues) -> None:
        self.gap = Finder((style.key, *style.end, *style.early_end))
        self.key = Finder(style.key_end)
        self.before_value = Finder((style.value,)) if style.value else None
        ends = (*style.value_end, *style.early_value_end)
        self.value = Finder(ends, newlines=1 if style.newline else 0)


_finders = functools.cache(_Finders)


class KeyValuesBody(PlainBody):
    """Makes a JSON object of them."""

    __slots__ = ("_begun", "_finders", "_schema", "_style", "_types")

    def __init__(self, style: KeyValues, sink: Sink, schema: Schema) -> None:
        super().__init__(sink, self._gap)
        self._style = style
        self._finders = _finders(style)
        self._schema = schema
        self._begun = False
        self._types: Types = ANY

    # ---- the steps

    def _gap(self, text: str, at: int, last: bool) -> int:  # noqa: FBT001 (a step)
        """Look for the next key, or the end."""
        found = self._finders.gap.find(text, at, last=last)
        if found is None:
            return len(text)
        marker: str | None = found.group(1)
        if marker is None:
            return found.start()
        if marker == self._style.key:
            self._step = self._key
            return found.end()
        self.done = True
        self._sink.arguments("}" if self._begun else "{}")
        return found.end() if marker in self._style.end else found.start()

    def _key(self, text: str, at: int, last: bool) -> int:  # noqa: FBT001 (a step)
        found = self._finders.key.find(text, at, last=last)
        end = len(text) if found is None else found.start()
        if end - at > _LONGEST_KEY:
            self.done = self.broken = True
            return at
        if found is None or found.group(1) is None:
            return at  # it is held back
        key = text[at : found.start()].strip()
        style = self._style
        if style.types:
            self._types = _BY_ATTRIBUTE[style.types[style.key_end.index(found.group(1))]]
        else:
            self._types = self._schema.of(key).types
        self._sink.arguments(f"{', ' if self._begun else '{'}{escape(key)}: ")
        self._begun = True
        self._step = self._before_value if self._finders.before_value else self._value_start
        return found.end()

    def _before_value(self, text: str, at: int, last: bool) -> int:  # noqa: FBT001 (a step)
        finder = self._finders.before_value
        found = finder.find(text, at, last=last) if finder else None
        if found is None:
            return len(text)
        if found.group(1) is None:
            return found.start()
        self._step = self._value_start
        return found.end()

    def _value_start(self, text: str, at: int, last: bool) -> int:  # noqa: FBT001 (a step)
        self._value = PlainValue(self._types)
        self._step = self._value_text
        return at + 1 if self._style.newline and text[at] == "\n" else at

    def _value_text(self, text: str, at: int, last: bool) -> int:  # noqa: FBT001 (a step)
        fragment, end, found = self._of_value(text, at, self._finders.value, last=last)
        if found is None:
            self._give(fragment)
            return end
        self._give(fragment + self._value.end())
        self._step = self._gap
        return found.end() if found.group(1) in self._style.value_end else end
