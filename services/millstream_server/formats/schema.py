"""Which JSON types a tool's schema allows for its arguments, for formats that write plain text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

Types = frozenset[str]

ANY: Types = frozenset(("string", "number", "integer", "boolean", "null", "object", "array"))
STRING: Types = frozenset(("string",))
NOT_STRING: Types = ANY - STRING
NOTHING: Mapping[str, Any] = {}
"""The keywords of what is no object."""
_MAX_DEPTH = 16
_MAX_STEPS = 4096
"""Parts that are looked at for one schema, each in a microsecond; in what is left of a larger
one all types are allowed."""
_NAMES_PER_STEP = 16
_KEPT = 256
_NAMES = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    dict: "object",
    list: "array",
    type(None): "null",
}


def type_name(value: Any) -> str:
    """Return the JSON type of a value."""
    return _NAMES.get(type(value), "string")


class Whole:
    """A whole schema, to which references lead, and what was found out of its parts.

    What was found out once is kept: a schema that refers to itself many times costs no more than
    one as long. Parts are known by their `id`: all belong to ``root``.
    """

    __slots__ = ("_members", "_places", "_types", "left", "root")

    def __init__(self, root: Mapping[str, Any]) -> None:
        self.root = root
        self.left = _MAX_STEPS
        """How many more parts may be looked at."""
        self._types: dict[tuple[int, int], Types] = {}
        self._members: dict[int, tuple[Mapping[str, Any], Any]] = {}
        self._places: dict[str, Any] = {}

    def place(self, reference: str) -> Any:
        """Return what a reference leads to; None: nothing."""
        if reference not in self._places:
            found: Any = self.root
            for part in reference[1:].split("/")[1:]:
                key = part.replace("~1", "/").replace("~0", "~")
                found = found.get(key) if isinstance(found, dict) else None
            self._places[reference] = found
        return self._places[reference]

    def types(self, node: Any, depth: int = _MAX_DEPTH) -> Types:
        """Return the types that a part allows, which may be none."""
        node = self._resolved(node)
        given, enum = node.get("type"), node.get("enum")
        own = isinstance(given, str | list) or "const" in node or isinstance(enum, list)
        key = id(node), 0 if own else depth
        if key in self._types:
            return self._types[key]
        if isinstance(given, str):
            found = frozenset((given,))
        elif isinstance(given, list):
            found = frozenset(each for each in given if isinstance(each, str))
        elif own:
            found = frozenset(map(type_name, [node["const"]] if "const" in node else node["enum"]))
        else:
            found = self._composed(node, depth)
        if node.get("nullable") is True:
            found |= {"null"}
        found = found | {"integer"} if "number" in found else found
        return self._types.setdefault(key, found)

    def member(self, node: Any, name: str) -> Any:
        """Return the schema of an object's property; None: it says nothing of it."""
        node = self._resolved(node)
        found = self._members.get(id(node))
        if found is None:
            own: dict[str, Any] = {}
            more = self._gather(node, own, set(), _MAX_DEPTH)
            found = self._members[id(node)] = own, more
        known = found[0].get(name)
        return found[1] if known is None else known

    def items(self, node: Any) -> Any:
        """Return the schema of an array's items."""
        return self._resolved(node).get("items")

    def _resolved(self, node: Any) -> Mapping[str, Any]:
        """Follow local references, and return an object."""
        for _ in range(_MAX_DEPTH):
            reference = node.get("$ref") if isinstance(node, dict) else None
            if not isinstance(reference, str) or not reference.startswith("#"):
                break
            node = self.place(reference)
        return node if isinstance(node, dict) else NOTHING

    def _parts(self, node: Mapping[str, Any], *keys: str) -> list[Any]:
        """Return the parts that a schema is composed of, as long as some may be looked at."""
        found: list[Any] = []
        for key in keys:
            given = node.get(key)
            if isinstance(given, list) and self.left >= 0:
                self.left -= len(given)
                found += given
        return found

    def _gather(
        self, node: Mapping[str, Any], names: dict[str, Any], seen: set[int], depth: int
    ) -> Any:
        """Add an object's properties to ``names``; return the schema of all others."""
        if id(node) in seen:
            return None
        seen.add(id(node))
        own = node.get("properties")
        if isinstance(own, dict):
            self.left -= len(own) // _NAMES_PER_STEP
            for name, part in own.items():
                names.setdefault(name, part)
        for part in self._parts(node, "anyOf", "oneOf", "allOf") if depth else ():
            more = self._gather(self._resolved(part), names, seen, depth - 1)
            if more is not None:
                return more
        return node.get("additionalProperties")

    def _composed(self, node: Mapping[str, Any], depth: int) -> Types:
        if not depth:
            return ANY
        found = ANY
        for key in ("anyOf", "oneOf"):
            if parts := self._parts(node, key):
                found &= frozenset().union(*(self.types(part, depth - 1) for part in parts))
        for part in self._parts(node, "allOf"):
            found &= self.types(part, depth - 1)
        if found != ANY:
            return found
        if "properties" in node:
            return frozenset(("object",))
        return frozenset(("array",)) if "items" in node else ANY


class Schema:
    """A JSON Schema, or a part of one."""

    __slots__ = ("_node", "_whole")

    def __init__(self, node: Any, whole: Whole | None = None) -> None:
        self._node = node if isinstance(node, dict) else NOTHING
        self._whole = Whole(self._node) if whole is None else whole

    def of(self, name: str) -> Schema:
        """Return the schema of an object's property; an empty one if it has none."""
        return Schema(self._whole.member(self._node, name), self._whole)

    @property
    def items(self) -> Schema:
        """The schema of an array's items."""
        return Schema(self._whole.items(self._node), self._whole)

    @property
    def types(self) -> Types:
        """The types that it allows; of an unknown or an empty schema all."""
        return self._whole.types(self._node) & ANY or ANY


class Tools:
    """The schemas of a request's tools, by name; each is read when it is needed."""

    __slots__ = ("_texts",)

    def __init__(self, schemas: Mapping[str, str]) -> None:
        """Keep ``schemas``: JSON texts; an empty one: no arguments are known."""
        self._texts = schemas

    def has(self, name: str) -> bool:
        return name in self._texts

    def schema(self, name: str) -> Schema:
        """Return a tool's schema; an empty one if it is unknown or can't be read."""
        return _read(self._texts.get(name, ""))


@lru_cache(maxsize=_KEPT)
def _read(text: str) -> Schema:
    try:
        return Schema(json.loads(text) if text else {})
    except (ValueError, RecursionError):
        return Schema({})
