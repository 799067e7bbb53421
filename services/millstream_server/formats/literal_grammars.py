"""The grammar of arguments that are literals: Python's, or with quotes of their own."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from millstream_server.formats.argument_grammars import plain_string
from millstream_server.formats.argument_schema import Node, Shape, UnconstrainableError
from millstream_server.formats.schema import ANY, Types
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
)

_KEY = r"[A-Za-z_][A-Za-z0-9_]{0,63}"
_BAD_IN_KEY = frozenset(" \t\r\n,:=()[]{}<>'\"")
_ANY_DEPTH = 2
"""How deep values nest of which a schema says nothing."""
_ANY_PARTS = 256
"""About what the grammar of such a value has."""
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_NUMBERS: Types = frozenset(("number", "integer"))
_CHAR = r'([^"\\\x00-\x1f]|\\[\\"nt])'


class _Syntax:
    """How values are written; this is Python's."""

    comma = ", "
    words: Mapping[Any, str] = {True: "True", False: "False", None: "None"}

    def key(self, name: str) -> str:
        return f"{json.dumps(name, ensure_ascii=False)}: "

    any_key: Part = sequence(const('"'), regex(_KEY), const('": '))

    def string(self, value: Shape) -> Part:
        if "pattern" in value.node:
            raise UnconstrainableError("a pattern isn't kept in this format")
        least, most = value.bound("minLength") or 0, value.bound("maxLength")
        upto = "" if most is None else most
        return regex(f'"{_CHAR}{{{least},{upto}}}"' if least or most is not None else f'"{_CHAR}*"')

    def text(self, value: str) -> str:
        return json.dumps(value, ensure_ascii=False)


class _Quoted(_Syntax):
    """Keys without quotes, strings between markers."""

    comma = ","
    words: Mapping[Any, str] = {True: "true", False: "false", None: "null"}
    any_key: Part = sequence(regex(_KEY), const(":"))

    def __init__(self, quote: str) -> None:
        self._quote = quote

    def key(self, name: str) -> str:
        if not name or _BAD_IN_KEY.intersection(name):
            raise UnconstrainableError(
                f"the property {name[:64]!r} can't be written in this format"
            )
        return f"{name}:"

    def string(self, value: Shape) -> Part:
        return tag(self._quote, plain_string(value, (self._quote,)), self._quote)

    def text(self, value: str) -> str:
        if self._quote in value:
            raise UnconstrainableError("a value of an enum has the quotes of this format in it")
        return f"{self._quote}{value}{self._quote}"


def python_arguments(schema: Node) -> Part:
    """Return the grammar of keyword arguments and the bracket that ends them."""
    shape, literals = Shape(schema), _Literals(_Syntax())
    for name in shape.properties:
        if not name.isidentifier():
            raise UnconstrainableError(f"the property {name[:64]!r} is no name in Python")
    return sequence(literals.members(shape, "{}=", sequence(regex(_KEY), const("="))), const(")"))


def quoted_arguments(quote: str, schema: Node) -> Part:
    """Return the grammar of what is between the braces, and of the brace that ends it."""
    syntax = _Quoted(quote)
    return sequence(_Literals(syntax).members(Shape(schema), "", syntax.any_key), const("}"))


class _Literals:
    def __init__(self, syntax: _Syntax) -> None:
        self._syntax = syntax

    def members(self, shape: Shape, key: str, any_key: Part) -> Part:
        """The properties of an object, in order; ``key`` is how one is written, if not as usual."""
        comma = const(self._syntax.comma)
        if (more := shape.additional) is not None:
            shape.refuse("anyOf", "oneOf", "patternProperties", "minProperties", "maxProperties")
            pair = sequence(any_key, self.value(more))
            return optional(sequence(pair, star(sequence(comma, pair))))
        pairs, needed = [], []
        for name, value in shape.properties.items():
            begin = key.format(name) if key else self._syntax.key(name)
            pairs.append(sequence(const(begin), self.value(value)))
            needed.append(name in shape.required)
        first = needed.index(True) + 1 if True in needed else len(needed)
        shape.spend(first * len(pairs) // 2)
        return self._listed(pairs, needed, comma)

    def _listed(self, pairs: Sequence[Part], needed: Sequence[bool], comma: Part) -> Part:
        """Match, in order and with commas between, those that are needed and any of the others."""
        ways = []
        for first, pair in enumerate(pairs):
            rest = [
                sequence(comma, each) if must else optional(sequence(comma, each))
                for each, must in zip(pairs[first + 1 :], needed[first + 1 :], strict=True)
            ]
            ways.append(sequence(pair, *rest))
            if needed[first]:
                return either(ways)
        return optional(either(ways)) if ways else NOTHING

    def value(self, shape: Shape) -> Part:
        if shape.values is not None:
            return either([const(self._literal(value)) for value in shape.values])
        branches = shape.branches
        if len(branches) > 1 or branches[0].node is not shape.node:
            return either([self.value(each) for each in branches])
        if shape.types == ANY and not shape.node.get("type"):
            shape.refuse("pattern", "minLength", "maxLength", "minItems", "maxItems", *_BOUNDS)
            shape.spend(_ANY_PARTS)
            return self._any(_ANY_DEPTH)
        return either([self._typed(kind, shape) for kind in self._kinds(shape.types)])

    def _kinds(self, types: Types) -> list[str]:
        return sorted(types - {"integer"} if "number" in types else types)

    def _typed(self, kind: str, shape: Shape) -> Part:
        words = self._syntax.words
        if kind == "string":
            return self._syntax.string(shape)
        if kind == "boolean":
            return either([const(words[True]), const(words[False])])
        if kind == "null":
            return const(words[None])
        if kind == "array":
            return self._array(shape)
        if kind == "object":
            inside = self.members(shape, "", self._syntax.any_key)
            return sequence(const("{"), inside, const("}"))
        return json_value(shape.only(_NUMBERS if kind == "number" else frozenset((kind,))))

    def _array(self, shape: Shape) -> Part:
        if "prefixItems" in shape.node:
            raise UnconstrainableError("prefixItems isn't kept in this format")
        least, most = shape.bound("minItems") or 0, shape.bound("maxItems")
        items = shape.node.get("items")
        item = self.value(shape.within(items)) if isinstance(items, dict) else self._any(_ANY_DEPTH)
        more = repeat(
            sequence(const(self._syntax.comma), item),
            max(least - 1, 0),
            None if most is None else max(most - 1, 0),
        )
        filled = sequence(item, more)
        inside = NOTHING if most == 0 else filled if least else optional(filled)
        return sequence(const("["), inside, const("]"))

    def _any(self, depth: int) -> Part:
        """Any value, as deep as given."""
        syntax = self._syntax
        ways = [
            syntax.string(Shape({})),
            json_value({"type": "number"}),
            *(const(syntax.words[word]) for word in (True, False, None)),
        ]
        if depth:
            item, comma = self._any(depth - 1), const(syntax.comma)
            pair = sequence(syntax.any_key, item)
            for begin, each, end in (("[", item, "]"), ("{", pair, "}")):
                inside = optional(sequence(each, star(sequence(comma, each))))
                ways.append(sequence(const(begin), inside, const(end)))
        return either(ways)

    def _literal(self, value: Any) -> str:
        syntax = self._syntax
        if value is None or isinstance(value, bool):
            return syntax.words[value]
        if isinstance(value, str):
            return syntax.text(value)
        if isinstance(value, list):
            return f"[{syntax.comma.join(map(self._literal, value))}]"
        if isinstance(value, dict):
            pairs = (syntax.key(key) + self._literal(each) for key, each in value.items())
            return "{" + syntax.comma.join(pairs) + "}"
        return json.dumps(value)
