"""Grammars of arguments that are nested elements: by the schema, or with types of their own."""

from __future__ import annotations

from millstream_server.formats.argument_grammars import (
    KEY,
    NO_JSON,
    elements,
    members,
    plain_string,
)
from millstream_server.formats.argument_schema import Node, Shape, UnconstrainableError
from millstream_server.formats.elements import Elements
from millstream_server.formats.markup import Markup
from millstream_server.formats.schema import ANY, STRING, Types
from millstream_server.formats.tag_parts import (
    Part,
    const,
    either,
    json_value,
    optional,
    regex,
    sequence,
    tag,
    text,
)

_NESTED: Types = frozenset(("object", "array"))
_FIRST = NO_JSON.replace(r"\\-z", r"\\^-z")
"""Nor may it begin this format's marker."""


def markup_arguments(style: Markup, schema: Node) -> Part:
    """Return the grammar of an object's properties, each an element."""
    markup = _Markup(style)
    return members(Shape(schema), markup.any, markup.one)


class _Markup:
    def __init__(self, style: Markup) -> None:
        self._before = style.before
        self._item = style.item

    def any(self, value: Shape) -> Part:
        key = sequence(regex(KEY), const(">"))
        begin, end = const(f"{self._before}<"), const(f"{self._before}</")
        return sequence(begin, key, self._value(value), end, key)

    def one(self, name: str, value: Shape) -> Part:
        begin, end = f"{self._before}<{name}>", f"{self._before}</{name}>"
        return tag(begin, self._value(value), end)

    def _value(self, value: Shape) -> Part:
        types = value.types
        if types <= _NESTED and len(types) == 1 and len(value.branches) == 1:
            shape = value.branches[0]
            if "object" in types:
                return members(shape, self.any, self.one)
            return elements(shape, lambda item: self.one(self._item, item))
        if types == ANY and not value.node:
            return optional(sequence(regex(_FIRST), text((self._before,))))
        if types & _NESTED:
            raise UnconstrainableError("an object or array beside another type isn't kept here")
        if "string" not in types:
            return json_value(value.only(types))
        if value.values is not None and types != STRING:
            raise UnconstrainableError("an enum of several types isn't kept here")
        ways = [each for each in value.branches if "string" in each.types]
        for each in value.branches:
            each.refuse("minLength")
            if each.types != STRING:
                each.refuse("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "enum")
        return either([plain_string(each, (self._before,)) for each in ways])


def element_arguments(style: Elements, schema: Node) -> Part:
    """Return the grammar of an object's properties, each an element."""
    found = _Elements(style)
    return members(Shape(schema), found.any, found.one)


class _Elements:
    def __init__(self, style: Elements) -> None:
        self._style = style

    def any(self, value: Shape) -> Part:
        named = sequence(const(f'{self._style.open} name="'), regex(KEY), const('"'))
        return self._element(named, value)

    def one(self, name: str, value: Shape) -> Part:
        if "&" in name:
            raise UnconstrainableError(f"the property {name[:64]!r} can't be written here")
        return self._element(const(f'{self._style.open} name="{name}"'), value)

    def _element(self, begin: Part, value: Shape) -> Part:
        close = self._style.close
        ways = [
            sequence(begin, tag(f' type="{kind}">', inside, close))
            for kind, inside in self._values(value)
        ]
        return either(ways)

    def _values(self, value: Shape) -> list[tuple[str, Part]]:
        """Return, of each way to write a value, its type and its grammar."""
        ways: list[tuple[str, Part]] = []
        for each in value.branches:
            if "string" in each.types:
                ways.append(("raw", plain_string(each, (self._style.close, self._style.end))))
            others = each.types - {"string"}
            if others == {"object"} and each.properties:
                ways.append(("dict", members(each, self.any, self.one)))
            elif others == {"array"} and isinstance(each.node.get("items"), dict):
                ways.append(("list", elements(each, self._item)))
            elif others:
                ways.append(("json", json_value(each.only(others))))
        return ways

    def _item(self, value: Shape) -> Part:
        return self._element(const(self._style.open), value)
