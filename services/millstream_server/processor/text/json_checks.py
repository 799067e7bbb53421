"""Checks of JSON in strings: tools' schemas, calls' arguments."""

from __future__ import annotations

from functools import lru_cache
from itertools import islice

from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match

from millstream_server.runtime.json_bounds import count_parts, read_object, read_schema

_MAX_ERROR_CHARS = 200
_MAX_ERRORS_COMPARED = 8

_META_VALIDATOR = Draft202012Validator(
    Draft202012Validator.META_SCHEMA, format_checker=Draft202012Validator.FORMAT_CHECKER
)


def object_problem(text: str) -> str | None:
    """Return why ``text`` is not an acceptable JSON object, or None."""
    problem, _ = read_object(text)
    return problem


# Cached: a conversation has the same tools in every turn, and a large schema takes milliseconds.
@lru_cache(maxsize=256)
def schema_problem(text: str) -> str | None:
    """Return why ``text`` is not an acceptable JSON Schema (Draft 2020-12) object, or None."""
    problem, schema = read_schema(text)
    if problem is not None:
        return problem
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
    """Count the schema's objects, arrays and booleans: checking takes time in proportion."""
    return count_parts(read_object(text)[1])
