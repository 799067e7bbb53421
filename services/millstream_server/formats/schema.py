"""Which JSON types a tool's schema allows for its arguments, for formats that write plain text."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

Types = frozenset[str]

ANY: Types = frozenset(("string", "number", "integer", "boolean", "null", "object", "array"))
STRING: Types = frozenset(("string",))
NOT_STRING: Types = ANY - STRING
_MAX_DEPTH = 16
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


class Schema:
    """A JSON Schema, or a part of one."""

    __slots__ = ("_node", "_root")

    def __init__(self, node: Any, root: Any = None) -> None:
        self._node = node if isinstance(node, dict) else {}
        self._root = self._node if root is None else root

    def of(self, name: str) -> Schema:
        """Return the schema of an object's property; an empty one if it has none."""
        return Schema(_property(self._root, self._node, name, _MAX_DEPTH), self._root)

    @property
    def items(self) -> Schema:
        """The schema of an array's items."""
        return Schema(_resolved(self._root, self._node).get("items"), self._root)

    @property
    def types(self) -> Types:
        """The types that it allows; of an unknown or an empty schema all."""
        return _types(self._root, self._node, _MAX_DEPTH) & ANY or ANY


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


def _resolved(root: Any, node: Any) -> Mapping[str, Any]:
    """Follow local references, and return an object."""
    for _ in range(_MAX_DEPTH):
        reference = node.get("$ref") if isinstance(node, dict) else None
        if not isinstance(reference, str) or not reference.startswith("#"):
            break
        node = root
        for part in reference[1:].split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            node = node.get(key) if isinstance(node, dict) else None
    return node if isinstance(node, dict) else {}


def _parts(node: Mapping[str, Any], *keys: str) -> Iterable[Any]:
    for key in keys:
        found = node.get(key)
        if isinstance(found, list):
            yield from found


def _property(root: Any, node: Any, name: str, depth: int) -> Any:
    node = _resolved(root, node)
    properties = node.get("properties")
    if isinstance(properties, dict) and name in properties:
        return properties[name]
    if depth:
        for part in _parts(node, "anyOf", "oneOf", "allOf"):
            if (found := _property(root, part, name, depth - 1)) is not None:
                return found
    return node.get("additionalProperties")


def _types(root: Any, node: Any, depth: int) -> Types:
    node = _resolved(root, node)
    given = node.get("type")
    if isinstance(given, str):
        found = frozenset((given,))
    elif isinstance(given, list):
        found = frozenset(each for each in given if isinstance(each, str))
    elif "const" in node:
        found = frozenset((type_name(node["const"]),))
    elif isinstance(node.get("enum"), list):
        found = frozenset(map(type_name, node["enum"]))
    else:
        found = _composed(root, node, depth) if depth else ANY
    if node.get("nullable") is True:
        found |= {"null"}
    return found | {"integer"} if "number" in found else found


def _composed(root: Any, node: Mapping[str, Any], depth: int) -> Types:
    found = ANY
    for key in ("anyOf", "oneOf"):
        if parts := list(_parts(node, key)):
            found &= frozenset().union(*(_types(root, part, depth - 1) for part in parts))
    for part in _parts(node, "allOf"):
        found &= _types(root, part, depth - 1)
    if found != ANY:
        return found
    if "properties" in node:
        return frozenset(("object",))
    return frozenset(("array",)) if "items" in node else ANY
