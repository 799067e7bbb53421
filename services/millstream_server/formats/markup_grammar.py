"""The grammar of arguments that are nested elements."""

from __future__ import annotations

from millstream_server.formats.argument_grammars import KEY, NO_JSON, bad_key, plain_string
from millstream_server.formats.argument_schema import Node, Shape, UnconstrainableError
from millstream_server.formats.markup import Markup
from millstream_server.formats.schema import ANY, STRING, Types
from millstream_server.formats.tag_parts import (
    Part,
    const,
    either,
    json_value,
    optional,
    regex,
    repeat,
    sequence,
    star,
    tag,
    text,
)

_NESTED: Types = frozenset(("object", "array"))
_FIRST = NO_JSON.replace(r"\\-z", r"\\^-z")
"""Nor may it begin this format's marker."""


def markup_arguments(style: Markup, schema: Node) -> Part:
    """Return the grammar of an object's properties, each an element."""
    return _Elements(style).members(Shape(schema))


class _Elements:
    def __init__(self, style: Markup) -> None:
        self._before = style.before
        self._item = style.item

    def members(self, shape: Shape) -> Part:
        if (more := shape.additional) is not None:
            shape.refuse("anyOf", "oneOf", "patternProperties", "minProperties", "maxProperties")
            key = sequence(regex(KEY), const(">"))
            begin, end = const(f"{self._before}<"), const(f"{self._before}</")
            return star(sequence(begin, key, self._value(more), end, key))
        parts = []
        for name, value in shape.properties.items():
            if bad_key(name):
                raise UnconstrainableError(f"the property {name[:64]!r} can't be written here")
            part = self._element(name, value)
            parts.append(part if name in shape.required else optional(part))
        return sequence(*parts)

    def _element(self, name: str, value: Shape) -> Part:
        begin, end = f"{self._before}<{name}>", f"{self._before}</{name}>"
        return tag(begin, self._value(value), end)

    def _value(self, value: Shape) -> Part:
        types = value.types
        if types <= _NESTED and len(types) == 1 and len(value.branches) == 1:
            shape = value.branches[0]
            return self.members(shape) if "object" in types else self._array(shape)
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
            if each not in ways or each.types != STRING:
                each.refuse("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "enum")
        return either([plain_string(each, (self._before,)) for each in ways])

    def _array(self, shape: Shape) -> Part:
        shape.refuse("prefixItems")
        item = self._element(self._item, shape.within(shape.node.get("items")))
        least, most = shape.bound("minItems") or 0, shape.bound("maxItems")
        if not least and most is None:
            return star(item)
        return repeat(item, least, most)
