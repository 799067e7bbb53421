"""Grammars of arguments that are nested elements: by the schema, or with types of their own."""

from __future__ import annotations

from millstream_server.formats.argument_grammars import KEY, NO_JSON, bad_key, plain_string
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
    repeat,
    sequence,
    star,
    tag,
    text,
)

_NO_BOUNDS = ("anyOf", "oneOf", "patternProperties", "minProperties", "maxProperties")
_NESTED: Types = frozenset(("object", "array"))
_FIRST = NO_JSON.replace(r"\\-z", r"\\^-z")
"""Nor may it begin this format's marker."""


def markup_arguments(style: Markup, schema: Node) -> Part:
    """Return the grammar of an object's properties, each an element."""
    return _Markup(style).members(Shape(schema))


class _Markup:
    def __init__(self, style: Markup) -> None:
        self._before = style.before
        self._item = style.item

    def members(self, shape: Shape) -> Part:
        if (more := shape.additional) is not None:
            shape.refuse(*_NO_BOUNDS)
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
            if each.types != STRING:
                each.refuse("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "enum")
        return either([plain_string(each, (self._before,)) for each in ways])

    def _array(self, shape: Shape) -> Part:
        shape.refuse("prefixItems")
        item = self._element(self._item, shape.within(shape.node.get("items")))
        least, most = shape.bound("minItems") or 0, shape.bound("maxItems")
        if not least and most is None:
            return star(item)
        return repeat(item, least, most)


def element_arguments(style: Elements, schema: Node) -> Part:
    """Return the grammar of an object's properties, each an element."""
    return _Elements(style).members(Shape(schema))


class _Elements:
    def __init__(self, style: Elements) -> None:
        self._style = style

    def members(self, shape: Shape) -> Part:
        if (more := shape.additional) is not None:
            shape.refuse(*_NO_BOUNDS)
            named = sequence(const(f'{self._style.open} name="'), regex(KEY), const('"'))
            return star(self._element(named, more))
        parts = []
        for name, value in shape.properties.items():
            if bad_key(name) or "&" in name:
                raise UnconstrainableError(f"the property {name[:64]!r} can't be written here")
            part = self._element(const(f'{self._style.open} name="{name}"'), value)
            parts.append(part if name in shape.required else optional(part))
        return sequence(*parts)

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
                ways.append(("dict", self.members(each)))
            elif others == {"array"} and isinstance(each.node.get("items"), dict):
                ways.append(("list", self._array(each)))
            elif others:
                ways.append(("json", json_value(each.only(others))))
        return ways

    def _array(self, shape: Shape) -> Part:
        shape.refuse("prefixItems")
        item = self._element(const(self._style.open), shape.within(shape.node["items"]))
        least, most = shape.bound("minItems") or 0, shape.bound("maxItems")
        return repeat(item, least, most) if least or most is not None else star(item)
