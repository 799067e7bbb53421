"""Checks a dashboard against Grafana's schema, as the SDK has it.

The SDK's classes are generated from Grafana's own CUE schema. Reading a dashboard into them and
writing it again drops what they don't know; then each field must have the type they declare.
"""

from __future__ import annotations

import enum
import json
import types
import typing
from collections.abc import Iterator
from typing import Any

from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

register_default_plugins()
# Options and field configurations of panels: the panel's type decides which class they have.
_OPEN = (object, Any)


def problems(text: str) -> list[str]:
    """Say what is wrong with a dashboard in JSON."""
    read = json.loads(text)
    board = Dashboard.from_json(read)
    known = json.loads(json.dumps(board, cls=JSONEncoder))
    wrong = [*_lost(read, known, "dashboard"), *_mistyped(board, "dashboard")]
    return wrong or list(_ambiguous(read))


def _lost(read: Any, known: Any, at: str) -> Iterator[str]:
    if isinstance(read, dict) and isinstance(known, dict):
        for key, value in read.items():
            if key in known:
                yield from _lost(value, known[key], f"{at}.{key}")
            else:
                yield f"{at}.{key}: not in the schema"
    elif isinstance(read, list) and isinstance(known, list) and len(read) == len(known):
        for number, (one, other) in enumerate(zip(read, known, strict=True)):
            yield from _lost(one, other, f"{at}[{number}]")
    elif read != known:
        yield f"{at}: {read!r} is read as {known!r}"


def _mistyped(value: Any, at: str) -> Iterator[str]:
    module = __import__(type(value).__module__, fromlist=["_"])
    for name, kind in typing.get_type_hints(type(value), vars(module)).items():
        yield from _wrong(getattr(value, name, None), kind, f"{at}.{name}")


def _wrong(value: Any, kind: Any, at: str) -> Iterator[str]:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind in _OPEN:
        if hasattr(type(value), "to_json"):
            yield from _mistyped(value, at)
    elif origin in {typing.Union, types.UnionType}:
        found = [list(_wrong(value, one, at)) for one in arguments]
        if all(found):
            yield min(found, key=len)[0]
    elif origin is typing.Literal:
        if value not in arguments:
            yield f"{at}: {value!r} is none of {arguments}"
    elif origin in {list, dict}:
        yield from _wrong_parts(value, origin, arguments[-1], at)
    elif isinstance(kind, type):
        yield from _unlike(value, kind, at)


def _wrong_parts(value: Any, whole: type, kind: Any, at: str) -> Iterator[str]:
    if not isinstance(value, whole):
        yield f"{at}: {value!r} is no {whole.__name__}"
        return
    for key, part in value.items() if isinstance(value, dict) else enumerate(value):
        yield from _wrong(part, kind, f"{at}[{key}]")


def _unlike(value: Any, kind: type, at: str) -> Iterator[str]:
    if issubclass(kind, enum.Enum):
        if value not in {*kind, *(one.value for one in kind)}:
            yield f"{at}: {value!r} is none of {[one.value for one in kind]}"
    elif kind is float and type(value) is int:
        return
    elif not isinstance(value, kind) or (isinstance(value, bool) and kind is int):
        yield f"{at}: {value!r} is no {kind.__name__}"
    elif hasattr(kind, "to_json") or hasattr(type(value), "to_json"):
        yield from _mistyped(value, at)


def _ambiguous(read: dict[str, Any]) -> Iterator[str]:
    """What the schema can't say: numbers of panels are unique, and panels don't overlap."""
    panels = read["panels"]
    if len({panel["id"] for panel in panels}) != len(panels):
        yield "dashboard.panels: two have one id"
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        if at["x"] + at["w"] > 24 or taken & cells:  # noqa: PLR2004 - Grafana's grid
            yield f"dashboard.panels: {panel['title']} has no room at {at}"
        taken |= cells
