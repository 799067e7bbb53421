"""What of a tool's JSON Schema the grammars of arguments are made of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from millstream_server.formats import schema
from millstream_server.formats.schema import ANY, NOTHING, Types, type_name

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
_NARROWING = frozenset(("properties", "required", "items", "enum", "const", "anyOf", "oneOf"))
_MAX_DEPTH = 32
MAX_PARTS = 1 << 14
"""What one grammar may be made of, with what references repeat: engines take no more."""
_SHAPE_PARTS = 8
"""Fewer than an argument takes."""
_NAMES_PER_PART = 8
_NO_NAMES: frozenset[str] = frozenset()


class UnconstrainableError(Exception):
    """A grammar can't keep what was asked for; the text says what and why."""

    def __init__(self, sentence: str, tool: str = "") -> None:
        """Of one ``tool``, or of the format."""
        super().__init__(sentence)
        self.tool = tool


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


class Whole(schema.Whole):
    """A whole schema, to which references lead."""

    __slots__ = ("parts",)

    def __init__(self, root: Node) -> None:
        super().__init__(root)
        self.parts = MAX_PARTS
        """How many more parts a grammar may have."""

    def spend(self, parts: int) -> None:
        """Count parts of a grammar before they are made.

        Raises:
            UnconstrainableError: they are too many.
        """
        self.parts -= parts
        if self.parts < 0 or self.left < 0:
            raise UnconstrainableError(
                "its schema is too large, or without an end, for this format"
            )

    def references(self, node: Any) -> Iterator[str]:
        """Yield the references in a part that is copied; all in it counts."""
        self.spend(1)
        if isinstance(node, dict) and isinstance(node.get("$ref"), str):
            yield node["$ref"]
        if isinstance(node, dict | list):
            for part in node.values() if isinstance(node, dict) else node:
                yield from self.references(part)


class Shape:
    """A schema or a part of one, with references followed."""

    __slots__ = (
        *("_branches", "_depth", "_properties", "_whole", "node", "required", "spend", "types"),
    )

    def __init__(self, node: Any, whole: Whole | None = None, depth: int = _MAX_DEPTH) -> None:
        """Look at ``node``, a part of ``whole``; None: it is the whole."""
        given: Node = node if isinstance(node, dict) else NOTHING
        self._whole = Whole(given) if whole is None else whole
        self._depth = depth
        self.spend = self._whole.spend
        self.spend(_SHAPE_PARTS if depth >= 0 else MAX_PARTS + 1)
        self.types: Types = self._whole.types(given) & ANY or ANY
        """The types that it allows."""
        self.node = self._resolved(given)
        """The keywords."""
        needed = self.node.get("required")
        self.required = frozenset(map(str, needed)) if isinstance(needed, list) else _NO_NAMES
        """The names of properties that have to be there."""
        self.spend(len(self.required) // _NAMES_PER_PART + len(self.values or ()))
        self._branches: list[Shape] | None = None
        self._properties: dict[str, Shape] | None = None

    def _resolved(self, node: Node) -> Node:
        for _ in range(_MAX_DEPTH):
            self.spend(len(node) // _NAMES_PER_PART)
            parts = node.get("allOf")
            if isinstance(parts, list) and len(parts) == 1 and isinstance(parts[0], dict):
                node = {**parts[0], **{key: node[key] for key in node if key != "allOf"}}
            reference = node.get("$ref")
            if not isinstance(reference, str):
                return node
            found = self._whole.place(reference)
            if not isinstance(found, dict):
                raise UnconstrainableError(f"its $ref {reference[:64]!r} leads nowhere")
            node = found
        raise UnconstrainableError("its references go in a circle")

    def within(self, node: Any) -> Shape:
        """Return the shape of a part of it."""
        return Shape(node, self._whole, self._depth - 1)

    def refuse(self, *keywords: str) -> None:
        """Raise if it has one of these keywords."""
        for keyword in keywords:
            if keyword in self.node:
                raise UnconstrainableError(f"{keyword!r} isn't kept in this format")

    @property
    def properties(self) -> dict[str, Shape]:
        """The declared properties of an object, in order."""
        self.refuse(
            "anyOf", "oneOf", "allOf", "patternProperties", "minProperties", "maxProperties"
        )
        if self._properties is None:
            found = self.node.get("properties")
            names = found if isinstance(found, dict) else {}
            self._properties = {name: self.within(part) for name, part in names.items()}
        return self._properties

    @property
    def additional(self) -> Shape | None:
        """The values of an object of which no property is declared; None: it has properties."""
        more = self.node.get("additionalProperties")
        return None if self.node.get("properties") or more is False else self.within(more)

    @property
    def branches(self) -> list[Shape]:
        """The parts of an anyOf or oneOf; it alone if there are none."""
        if self._branches is None:
            self._branches = self._divided() or [self]
        return self._branches

    def _divided(self) -> list[Shape]:
        for key in ("anyOf", "oneOf"):
            parts = self.node.get(key)
            if isinstance(parts, list) and parts:
                for other in sorted(set(self.node) & (_NARROWING - {key})):
                    raise UnconstrainableError(f"{key} beside {other!r} isn't kept in this format")
                return [each for part in parts for each in self.within(part).branches]
        return []

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
        node = self.narrowed(types)
        references = list(self._whole.references(node))
        if any(not each.startswith(("#/$defs/", "#/definitions/")) for each in references):
            raise UnconstrainableError("a $ref of it leads elsewhere than to $defs")
        if not references:
            return node
        shared = {key: self._whole.root[key] for key in _SHARED if key in self._whole.root}
        list(self._whole.references(shared))  # counts it
        return {**node, **shared}

    def narrowed(self, types: Types) -> dict[str, Any]:
        """Return what it allows of some types, with its references."""
        branches = self.branches
        if len(branches) > 1 or branches[0].node is not self.node:
            return {"anyOf": [each.narrowed(types) for each in branches if each.types & types]}
        if (values := self.values) is not None:
            return {"enum": [each for each in values if type_name(each) in types]}
        node = dict(self.node)
        if self.types - types:
            found = self.types & types
            node["type"] = sorted(found - {"integer"} if "number" in found else found)
        return node
