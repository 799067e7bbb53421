"""JSON that clients send in strings: limits on size, depth and parts; no reference is fetched."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NoReturn

MAX_JSON_BYTES = 64 * 1024
MAX_JSON_DEPTH = 32
MAX_SUBSCHEMAS = 4096
"""Per request: templates and engines walk through each, and 64 KiB can hold 15,000."""
_PARTS = (dict, list, bool)
_REFERENCES = ("$ref", "$dynamicRef")


def read_object(
    text: str, *, max_bytes: int = MAX_JSON_BYTES, max_depth: int = MAX_JSON_DEPTH
) -> tuple[str | None, dict[str, Any]]:
    """Return (None, the object), or (what is wrong, {})."""
    if len(text) > max_bytes or len(text.encode()) > max_bytes:
        return f"must not exceed {max_bytes // 1024} KiB", {}
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
        # JSON can contain half a surrogate pair, which no tokenizer accepts.
        json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        return f"must not nest deeper than {max_depth}", {}
    except ValueError:
        return "must be valid JSON", {}
    if not isinstance(value, dict):
        return "must be a JSON object", {}
    if _depth_exceeds(value, max_depth):
        return f"must not nest deeper than {max_depth}", {}
    return None, value


def read_schema(text: str) -> tuple[str | None, dict[str, Any]]:
    """Return (None, the schema), or (what is wrong, {}). It isn't checked against JSON Schema."""
    problem, schema = read_object(text)
    if problem is not None:
        return problem, {}
    problem = size_problem(schema) or schema_problem(schema)
    return (problem, {}) if problem else (None, schema)


def size_problem(value: object, most: int = MAX_SUBSCHEMAS) -> str | None:
    """Return that JSON has too many parts, or None."""
    if count_parts(value) > most:
        return f"must not have more than {most} parts"
    return None


def schema_problem(schema: Mapping[str, Any]) -> str | None:
    """Return what is wrong with a schema of few parts, or None."""
    if _depth_exceeds(schema, MAX_JSON_DEPTH):
        return f"must not nest deeper than {MAX_JSON_DEPTH}"
    if any(not reference.startswith("#") for reference in _references(schema)):
        return "must not refer outside itself: every $ref starts with '#'"
    return None


def count_parts(value: object) -> int:
    """Count the objects, arrays and booleans: using the schema takes time in proportion."""
    # true and false are valid schemas.
    levels = _levels(value)
    return 1 + sum(isinstance(child, _PARTS) for level in levels for child in level)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _depth_exceeds(value: object, limit: int) -> bool:
    # The last level has values only, which nest no deeper than what holds them.
    return sum(1 for _ in itertools.islice(_levels(value), limit + 1)) > limit


def _levels(value: object) -> Iterator[list[object]]:
    """Yield, level by level, what objects and arrays hold: loops are faster than recursion."""
    level = [value]
    while level := [each for each in level if isinstance(each, dict | list)]:
        level = [child for each in level for child in _children(each)]
        yield level


def _references(value: object) -> Iterator[str]:
    if isinstance(value, dict):
        for key in _REFERENCES:
            reference = value.get(key)
            # A property may be named "$ref"; its value is a schema then, not a string.
            if isinstance(reference, str):
                yield reference
    for child in _children(value):
        yield from _references(child)


def _children(value: object) -> Iterable[object]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()
