"""JSON that callers send inside strings: bounded in size and depth, and nothing is ever fetched."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import islice
from typing import Any, NoReturn

from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match

MAX_JSON_BYTES = 64 * 1024
MAX_JSON_DEPTH = 32
MAX_SUBSCHEMAS = 4096
"""Of one request: each costs 0.2 ms to check, and 64 KiB hold 15,000."""
_MAX_ERROR_CHARS = 200
_MAX_ERRORS_COMPARED = 8
_REFERENCES = ("$ref", "$dynamicRef")

_META_VALIDATOR = Draft202012Validator(
    Draft202012Validator.META_SCHEMA, format_checker=Draft202012Validator.FORMAT_CHECKER
)


def object_problem(text: str) -> str | None:
    """Say why ``text`` is not an acceptable JSON object, or None."""
    problem, _ = _parse_object(text)
    return problem


# A conversation sends the same tools at every turn; checking a large schema takes milliseconds.
@lru_cache(maxsize=256)
def schema_problem(text: str) -> str | None:
    """Say why ``text`` is not an acceptable JSON Schema (Draft 2020-12) object, or None."""
    problem, schema = _parse_object(text)
    if problem is not None:
        return problem
    if _count_subschemas(schema) > MAX_SUBSCHEMAS:
        return f"must not have more than {MAX_SUBSCHEMAS} parts"
    for reference in _references(schema):
        if not reference.startswith("#"):
            return "must not refer outside itself: every $ref starts with '#'"
    try:
        error = best_match(islice(_META_VALIDATOR.iter_errors(schema), _MAX_ERRORS_COMPARED))
    except (RecursionError, OverflowError):
        # From compiling a `pattern`.
        return "holds a regular expression that is too complex"
    if error is None:
        return None
    sentence = f"must be a valid JSON Schema (Draft 2020-12): {error.json_path}: {error.message}"
    return sentence[:_MAX_ERROR_CHARS]


def count_subschemas(text: str) -> int:
    """Return how much work it is to check this schema: its objects, arrays and booleans."""
    return _count_subschemas(_parse_object(text)[1])


def _parse_object(text: str) -> tuple[str | None, dict[str, Any]]:
    """Return a problem, or None and the object."""
    if len(text) > MAX_JSON_BYTES or len(text.encode()) > MAX_JSON_BYTES:
        return f"must not exceed {MAX_JSON_BYTES // 1024} KiB", {}
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
        # JSON can spell half a surrogate pair, which is no text: no tokenizer takes it.
        json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        return f"must not nest deeper than {MAX_JSON_DEPTH}", {}
    except ValueError:
        return "must be valid JSON", {}
    if not isinstance(value, dict):
        return "must be a JSON object", {}
    if _depth_exceeds(value, MAX_JSON_DEPTH):
        return f"must not nest deeper than {MAX_JSON_DEPTH}", {}
    return None, value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _depth_exceeds(value: object, limit: int) -> bool:
    """Count the objects and arrays around each other, the outermost included."""
    if limit == 0:
        return True
    return any(
        _depth_exceeds(child, limit - 1)
        for child in _children(value)
        if isinstance(child, dict | list)
    )


def _count_subschemas(value: object) -> int:
    # true and false are schemas, too.
    inner = (child for child in _children(value) if isinstance(child, dict | list | bool))
    return 1 + sum(_count_subschemas(child) for child in inner)


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
