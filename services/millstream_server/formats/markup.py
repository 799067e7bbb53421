"""Arguments written as nested elements, each named by its key."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from millstream_server.formats.finder import Finder
from millstream_server.formats.json_text import SPACE, escape
from millstream_server.formats.plain_value import PlainBody, PlainValue
from millstream_server.formats.reader import Sink
from millstream_server.formats.schema import Schema, Tools

_LONGEST_TAG = 512
_MOST_NESTED = 128


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Markup:
    """How they are written: each tag has ``before`` before its bracket."""

    before: str
    item: str = "item"
    """The tag of an array's parts."""

    def body(self, sink: Sink, name: str, tools: Tools) -> MarkupBody:
        """Read the arguments of a call of the tool ``name``."""
        return MarkupBody(self, sink, tools.schema(name))


class MarkupBody(PlainBody):
    """Makes a JSON object of them."""

    __slots__ = ("_counts", "_ends", "_finder", "_opening", "_schemas", "_style")

    def __init__(self, style: Markup, sink: Sink, schema: Schema) -> None:
        super().__init__(sink, self._between)
        self._style = style
        self._opening, self._finder = _tags(style)
        self._schemas = [schema]
        """Of all elements that are open; the last one's value may be read just now."""
        self._ends = ["}"]
        """The ends in JSON of those that have parts."""
        self._counts = [0]

    # ---- the steps

    def _between(self, text: str, at: int, last: bool) -> int:  # noqa: FBT001 (a step)
        """Look for the next tag."""
        found = self._finder.find(text, at, last=last)
        if found is None:
            return len(text)
        if found.group(1) is None:
            return found.start()
        self._step = self._open_tag if found.group(1) == self._opening else self._close_tag
        return found.end()

    def _open_tag(self, text: str, at: int, last: bool) -> int:  # noqa: FBT001 (a step)
        end = self._tag_end(text, at)
        if end is None or self.done:
            return at
        key, in_array = text[at:end].strip(), self._ends[-1] == "]"
        divider = ", " if self._counts[-1] else "{" if len(self._ends) == 1 else ""
        self._counts[-1] += 1
        self._sink.arguments(divider if in_array else f"{divider}{escape(key)}: ")
        schema = self._schemas[-1]
        self._schemas.append(schema.items if in_array else schema.of(key))
        if len(self._schemas) > _MOST_NESTED:
            self.done = self.broken = True
        self._step = self._meet_value
        return end + 1

    def _meet_value(self, text: str, at: int, last: bool) -> int:  # noqa: FBT001 (a step)
        """See whether an element has parts or a text."""
        types = self._schemas[-1].types
        if not types & {"object", "array"}:
            return self._begin_value(at)
        space = SPACE.match(text, at)
        start = at if space is None else space.end()
        opening, item = self._opening, f"{self._opening}{self._style.item}>"
        if not last and item.startswith(text[start:]) and len(text) - start < len(item):
            return at  # too little to know
        if not text.startswith(opening, start) or text.startswith("/", start + len(opening)):
            return self._begin_value(at)
        is_array = "array" in types and ("object" not in types or text.startswith(item, start))
        self._sink.arguments("[" if is_array else "{")
        self._ends.append("]" if is_array else "}")
        self._counts.append(0)
        self._step = self._between
        return start

    def _begin_value(self, at: int) -> int:
        self._value = PlainValue(self._schemas[-1].types)
        self._step = self._value_text
        return at

    def _value_text(self, text: str, at: int, last: bool) -> int:  # noqa: FBT001 (a step)
        fragment, end, found = self._of_value(text, at, self._finder, last=last)
        if found is None:
            self._give(fragment)
            return end
        if found.group(1) == self._opening:  # no tag of the model's: the value has it
            self._give(fragment + self._value.piece(found.group()))
            return found.end()
        self._give(fragment + self._value.end())
        self._step = self._close_tag
        self._ends.append("")
        self._counts.append(0)
        return found.end()

    def _close_tag(self, text: str, at: int, last: bool) -> int:  # noqa: FBT001 (a step)
        end = self._tag_end(text, at)
        if end is None or self.done:
            return at
        self._schemas.pop()
        as_json, count = self._ends.pop(), self._counts.pop()
        self.done = not self._ends
        self._give("{}" if self.done and not count else as_json)
        self._step = self._between
        return end + 1

    def _tag_end(self, text: str, at: int) -> int | None:
        end = text.find(">", at)
        if (len(text) if end < 0 else end) - at > _LONGEST_TAG:
            self.done = self.broken = True
        return None if end < 0 else end


@functools.cache
def _tags(style: Markup) -> tuple[str, Finder]:
    return f"{style.before}<", Finder((f"{style.before}<", f"{style.before}</"))
