"""The grammar of a call's arguments: what a tool's schema allows, as the model writes it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from millstream_server.formats.argument_schema import Node, Shape, UnconstrainableError
from millstream_server.formats.key_values import KeyValues
from millstream_server.formats.schema import STRING, Types
from millstream_server.formats.tag_parts import (
    NOTHING,
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
from millstream_server.formats.written import Written, piece

_NESTED: Types = frozenset(("object", "array"))
_WORDS = frozenset(("true", "True", "false", "False", "null", "None"))
KEY = r"[A-Za-z_][A-Za-z0-9_.\-]{0,63}"
_BAD_IN_KEY = frozenset("<>\"'\n\r\t")
_AS_JSON = ("object", "array", "number", "boolean", "null")
NO_JSON = (
    "[!-;=-Z\\\\-z|-~\u00a1-\u167f\u1681-\u1fff\u200b-\u2027\u202a-\u202e\u2030-\u205e"
    "\u2060-\u2fff\u3001-\U0010ffff]"
)
"""A character that begins neither JSON nor a marker, and isn't white space."""
_OF_STRINGS = ("pattern", "minLength", "maxLength")
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")


def json_arguments(schema: Node) -> Part:
    """Return the grammar of arguments that are a JSON object."""
    return json_value(
        schema if {"type", "$ref", "anyOf"} & set(schema) else {"type": "object", **schema}
    )


def key_value_arguments(style: KeyValues, written: Written, schema: Node) -> Part:
    """Return the grammar of arguments that are keys and values between markers."""
    parameters = _Parameters(style, written)
    return members(Shape(schema), parameters.any, parameters.one)


def members(
    shape: Shape, of_any: Callable[[Shape], Part], of_one: Callable[[str, Shape], Part]
) -> Part:
    """Return the grammar of an object's properties in order, or of those of any name."""
    if (more := shape.additional) is not None:
        shape.refuse("anyOf", "oneOf", "patternProperties", "minProperties", "maxProperties")
        return star(of_any(more))
    parts = []
    for name, value in shape.properties.items():
        if not name or name != name.strip() or _BAD_IN_KEY.intersection(name):
            raise UnconstrainableError(
                f"the property {name[:64]!r} can't be written in this format"
            )
        part = of_one(name, value)
        parts.append(part if name in shape.required else optional(part))
    return sequence(*parts)


def elements(shape: Shape, of_item: Callable[[Shape], Part]) -> Part:
    """Return the grammar of an array whose items have nothing between them."""
    shape.refuse("prefixItems")
    item = of_item(shape.within(shape.node.get("items")))
    least, most = shape.bound("minItems") or 0, shape.bound("maxItems")
    return repeat(item, least, most) if least or most is not None else star(item)


class _Parameters:
    """Single arguments."""

    def __init__(self, style: KeyValues, written: Written) -> None:
        self._style = style
        newline = "\n" if style.newline else ""
        self._open = style.value + newline
        self._close = newline + style.value_end[0]
        self._inner_gap, self._gap = piece(written.inner_gap), piece(written.gap)
        self._without = (*style.value_end, *style.early_value_end)

    def any(self, value: Shape) -> Part:
        """An argument of any name."""
        return self._written(sequence(const(self._style.key), regex(KEY)), value)

    def one(self, name: str, value: Shape) -> Part:
        """The argument of a property."""
        return self._written(const(self._style.key + name), value)

    def _written(self, begin: Part, value: Shape) -> Part:
        return either(
            [
                sequence(
                    begin,
                    const(end),
                    self._inner_gap,
                    tag(self._open, each, self._close),
                    self._gap,
                )
                for end, each in self._values(value)
            ]
        )

    def _values(self, value: Shape) -> list[tuple[str, Part]]:
        """Return, of each way to write a value, what ends its key, and the value's grammar."""
        style = self._style
        if not style.types:
            return [(style.key_end[0], self._by_schema(value))]
        ways = []
        if "string" in value.types:
            ways.append((style.key_end[style.types.index("string")], self._strings(value)))
        for kind in _AS_JSON:
            if kind in value.types:
                schema = value.only(
                    frozenset(("integer", "number")) if kind == "number" else frozenset((kind,))
                )
                ways.append((self._json_end(kind), json_value(schema)))
        if "integer" in value.types and "number" not in value.types:
            ways.append((self._json_end("number"), json_value(value.only(frozenset(("integer",))))))
        return ways

    def _json_end(self, kind: str) -> str:
        """Return what ends the key of a JSON value of a type."""
        style = self._style
        named = [end for end in style.key_end if f'"{kind}"' in end]
        return named[0] if named else style.key_end[style.types.index("json")]

    def _by_schema(self, value: Shape) -> Part:
        """A value whose type the schema says: what isn't a string is JSON."""
        types = value.types
        if "string" not in types:
            return json_value(value.only(types))
        others = types - STRING
        if value.values is not None:
            return self._enumerated(value.values, others)
        ways = [each for each in value.branches if each.types != STRING]
        if any(set(_BOUNDS).intersection(each.node) for each in ways):
            raise UnconstrainableError(
                "in this format a text may be read as a number, which its bounds may not allow"
            )
        if not others & _NESTED:
            return self._strings(value)
        # A text that begins like JSON is read as JSON.
        for each in value.branches:
            each.refuse(*_OF_STRINGS)
        plain = optional(sequence(regex(NO_JSON), text(self._without)))
        return either([json_value(value.only(_NESTED)), plain])

    def _enumerated(self, values: Sequence[Any], others: Types) -> Part:
        parts = []
        for value in values:
            if not isinstance(value, str):
                parts.append(const(json.dumps(value, ensure_ascii=False)))
            elif self._can_be(value) and (not others or _only_a_string(value)):
                parts.append(const(value))
        if not parts:
            raise UnconstrainableError("no value of an enum can be written in this format")
        return either(parts)

    def _can_be(self, value: str) -> bool:
        return not any(marker in value for marker in self._without)

    def _strings(self, value: Shape) -> Part:
        """The strings of a value, as plain text."""
        if value.values is not None:
            return self._enumerated(
                [each for each in value.values if isinstance(each, str)], STRING
            )
        ways = [
            plain_string(each, self._without) for each in value.branches if "string" in each.types
        ]
        free = text(self._without)
        return free if free in ways else either(ways)


def _only_a_string(value: str) -> bool:
    """Return whether a text is read as a string, whatever else may be there."""
    return value.strip()[:1].isalpha() and value.strip() not in _WORDS


def plain_string(value: Shape, without: Sequence[str]) -> Part:
    """Return the grammar of a string that is written as it is, up to a marker."""
    least, most = value.bound("minLength") or 0, value.bound("maxLength")
    if value.values is not None:
        return either([const(each) for each in value.values if isinstance(each, str)])
    if (pattern := value.node.get("pattern")) is not None:
        if least or most is not None:
            raise UnconstrainableError("a pattern together with minLength or maxLength isn't kept")
        return regex(pattern)
    if not least:
        return text(without, most)
    # None of the first characters may begin a marker.
    begin = regex(rf"[^<\n]{{{least}}}")
    return sequence(
        begin, NOTHING if most == least else text(without, None if most is None else most - least)
    )
