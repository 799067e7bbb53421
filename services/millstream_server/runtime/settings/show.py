"""Shows settings: the values in effect, and which ones a component has."""

from __future__ import annotations

import dataclasses
import enum
import json
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from millstream_server.runtime.settings.arguments import EngineArguments
from millstream_server.runtime.settings.declare import SCALARS, choices, option, variable

MASK = "***"


def plain(value: Any) -> Any:
    """Return a setting's value as JSON types."""
    if isinstance(value, EngineArguments):
        return value.shown
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, Path):
        return str(value)
    return list(value) if isinstance(value, tuple) else value


def describe(settings: Any) -> dict[str, Any]:
    """Return the effective settings as JSON types, secrets masked."""
    return {
        f.name: MASK if f.metadata["secret"] and value else plain(value)
        for f, value in _values(settings)
    }


def _values(settings: Any) -> Iterator[tuple[dataclasses.Field[Any], Any]]:
    for f in dataclasses.fields(settings):
        value = getattr(settings, f.name)
        if "group" in f.metadata:
            yield from _values(value)
        else:
            yield f, value


def print_config(settings: Any, origins: Mapping[str, str]) -> str:
    """Return the settings in effect as a settings file, each with where it comes from.

    Secrets are comments, as a file may have none.
    """
    lines = []
    for f, value in _values(settings):
        origin = origins.get(f.name, "default")
        if f.metadata["secret"]:
            lines.append(f"# {f.name}: {MASK if value else 'none'}  # {origin}, {variable(f.name)}")
        elif isinstance(value, EngineArguments) and value.read:
            lines.append(f"{f.name}:")
            for name, each in value.read.items():
                text = f"{name}: {_text(each.shown)}  # {each.source}"
                lines.append(f"  # {text}" if each.shown == MASK else f"  {text}")
        else:
            lines.append(f"{f.name}: {_text(plain(value))}  # {origin}")
    return "\n".join(lines) + "\n"


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def schema(cls: type[Any]) -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of a settings file for ``cls``, with all of its sections.

    It has no required settings: a flag or a variable can give them too. The names of secrets and
    their descriptions are under `x-environment-only`.
    """
    fields = list(_fields(cls))
    secrets = {variable(f.name): f.metadata["help"] for f, _ in fields if f.metadata["secret"]}
    known = {f.name: _described(f, kind) for f, kind in fields if not f.metadata["secret"]}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **_section(known),
        "x-environment-only": secrets,
    }


def _fields(cls: type[Any]) -> Iterator[tuple[dataclasses.Field[Any], Any]]:
    hints = typing.get_type_hints(cls)
    for f in dataclasses.fields(cls):
        if "group" in f.metadata:
            yield from _fields(f.metadata["group"])
        else:
            yield f, hints[f.name]


def _section(known: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the schema of a mapping of settings, given by what is left of their names."""
    properties: dict[str, Any] = dict(known)
    parts: dict[str, dict[str, Mapping[str, Any]]] = {}
    for name, described in known.items():
        for at in (i for i, sign in enumerate(name) if sign == "_"):
            parts.setdefault(name[:at], {})[name[at + 1 :]] = described
    for name, inner in parts.items():
        section = _section(inner)
        section["type"] = ["object", "null"]
        own = properties.get(name)
        properties[name] = {"anyOf": [own, section]} if own else section
    return {"type": "object", "additionalProperties": False, "properties": properties}


def _described(f: dataclasses.Field[Any], kind: Any) -> dict[str, Any]:
    described = {**_type(f, kind), "description": f.metadata["help"]}
    if f.default is not dataclasses.MISSING:
        described["default"] = plain(f.default)
    return described


def _type(f: dataclasses.Field[Any], kind: Any) -> dict[str, Any]:
    if isinstance(f.default, EngineArguments):
        return {"type": ["object", "null"]}
    if typing.get_origin(kind) is tuple:
        texts: dict[str, Any] = {"type": "array", "items": {"type": "string"}}
        if not f.metadata["pairs"]:
            return texts
        values = {"type": ["string", "null"]}
        return {"anyOf": [texts, {"type": "object", "additionalProperties": values}]}
    if inner := option(kind):
        return {"type": [_name(inner), "null"]}
    if chosen := choices(kind):
        return {"enum": chosen}
    described: dict[str, Any] = {"type": _name(kind)}
    if kind in (int, float):
        described["minimum"] = 0
    return described


def _name(kind: Any) -> str:
    return SCALARS[kind].in_json if kind in SCALARS else "string"
