"""What of a tool's JSON Schema the grammars of arguments are made of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from millstream_server.formats.schema import ANY, Schema, Types

Node = Mapping[str, Any]

_SHARED = ("$defs", "definitions")
_UNKEPT = frozenset(
    (
        "contains",
        "dependencies",
        "dependentRequired",
        "dependentSchemas",
        "if",
        "maxContains",
        "minContains",
        "multipleOf",
        "not",
        "propertyNames",
        "unevaluatedItems",
        "unevaluatedProperties",
        "uniqueItems",
    )
)
_PARTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_MAPS = ("properties", "patternProperties", *_SHARED)
_SINGLE = ("items", "additionalProperties")
_MAX_DEPTH = 32


class UnconstrainableError(Exception):
    """A grammar can't keep what was asked for; the text says what and why."""


def unkept(node: Any, depth: int = _MAX_DEPTH) -> Iterator[str]:
    """Yield the keywords of a schema that no grammar here keeps."""
    if not isinstance(node, dict) or not depth:
        return
    yield from sorted(_UNKEPT.intersection(node))
    if isinstance(node.get("allOf"), list) and len(node["allOf"]) > 1:
        yield "allOf"
    for key in _PARTS:
        for part in node[key] if isinstance(node.get(key), list) else ():
            yield from unkept(part, depth - 1)
    for key in _MAPS:
        for part in node[key].values() if isinstance(node.get(key), dict) else ():
            yield from unkept(part, depth - 1)
    for key in _SINGLE:
        yield from unkept(node.get(key), depth - 1)


class Shape:
    """A schema or a part of one, with references followed."""

    __slots__ = ("_depth", "_root", "node", "types")

    def __init__(self, node: Any, root: Node | None = None, depth: int = _MAX_DEPTH) -> None:
        """Look at ``node``, whose references are those of ``root``; None: its own."""
        given: Node = node if isinstance(node, dict) else {}
        self._root = given if root is None else root
        self._depth = depth
        self.types: Types = Schema(given, self._root).types
        """The types that it allows."""
        self.node = self._resolved(given)
        """The keywords."""

    def _resolved(self, node: Node) -> Node:
        for _ in range(_MAX_DEPTH):
            parts = node.get("allOf")
            if isinstance(parts, list) and len(parts) == 1 and isinstance(parts[0], dict):
                node = {**parts[0], **{key: node[key] for key in node if key != "allOf"}}
            reference = node.get("$ref")
            if not isinstance(reference, str):
                return node
            found: Any = self._root
            for part in reference.removeprefix("#").split("/")[1:]:
                key = part.replace("~1", "/").replace("~0", "~")
                found = found.get(key) if isinstance(found, dict) else None
            if not isinstance(found, dict):
                raise UnconstrainableError(f"its $ref {reference[:64]!r} leads nowhere")
            node = found
        raise UnconstrainableError("its references go in a circle")

    def within(self, node: Any) -> Shape:
        """Return the shape of a part of it."""
        if not self._depth:
            raise UnconstrainableError("it nests too deep, or without an end, for this format")
        return Shape(node, self._root, self._depth - 1)

    @property
    def properties(self) -> dict[str, Shape]:
        """The declared properties, in order."""
        found = self.node.get("properties")
        names = found if isinstance(found, dict) else {}
        return {name: self.within(part) for name, part in names.items()}

    @property
    def required(self) -> frozenset[str]:
        found = self.node.get("required")
        return frozenset(map(str, found)) if isinstance(found, list) else frozenset()

    @property
    def open(self) -> bool:
        """Whether it is an object of which nothing is declared."""
        closed = self.node.get("additionalProperties") is False
        return not self.node.get("properties") and not closed

    @property
    def branches(self) -> list[Shape]:
        """The parts of an anyOf or oneOf; it alone if there are none."""
        for key in ("anyOf", "oneOf"):
            parts = self.node.get(key)
            if isinstance(parts, list) and parts:
                return [each for part in parts for each in self.within(part).branches]
        return [self]

    @property
    def values(self) -> list[Any] | None:
        """The values of an enum or a const; None: it has none."""
        if "const" in self.node:
            return [self.node["const"]]
        found = self.node.get("enum")
        return found if isinstance(found, list) else None

    def bound(self, key: str) -> int | None:
        """Return a bound, such as "minLength"."""
        found = self.node.get(key)
        return found if isinstance(found, int) and not isinstance(found, bool) else None

    def only(self, types: Types) -> Node:
        """Return a schema, for itself, of what it allows of some types."""
        shared = {key: self._root[key] for key in _SHARED if key in self._root}
        branches = self.branches
        if branches != [self]:
            kept = [dict(each.only(types)) for each in branches if each.types & types]
            return {**shared, "anyOf": kept}
        node = {**shared, **self.node}
        if self.values is None and self.types - types:
            node["type"] = sorted(
                (self.types & types) - ({"integer"} if "number" in types else set())
            )
        if _refers_elsewhere(node):
            raise UnconstrainableError("a $ref of it leads elsewhere than to $defs")
        return node


def _refers_elsewhere(node: Any) -> bool:
    if isinstance(node, list):
        return any(map(_refers_elsewhere, node))
    if not isinstance(node, dict):
        return False
    reference = node.get("$ref")
    if isinstance(reference, str) and not reference.startswith(("#/$defs/", "#/definitions/")):
        return True
    return any(map(_refers_elsewhere, node.values()))


__all__ = ["ANY", "Node", "Shape", "UnconstrainableError", "unkept"]
