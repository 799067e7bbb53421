"""Checks of JSON in strings: tools' schemas, calls' arguments."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Any

from jsonschema import Draft202012Validator, FormatChecker
from jsonschema.exceptions import ValidationError, best_match
from jsonschema.validators import extend
from jsonschema_specifications import REGISTRY as SPECIFICATIONS
from referencing import Registry
from referencing.jsonschema import DRAFT202012

from millstream_server.processor.text.patterns import PatternError, check_pattern
from millstream_server.runtime.json_bounds import (
    MAX_SUBSCHEMAS,
    count_parts,
    read_object,
    read_schema,
)

_MAX_ERROR_CHARS = 240
_MAX_ERRORS_COMPARED = 8
_SHOWN_CHARS = 32
_KEPT_SCHEMAS = 256
_ENTRIES_PER_PART = 4
_SECONDS_PER_PART = 0.3e-3

# A conversation has the same tools in every turn, and a large schema takes milliseconds.
_known: OrderedDict[str, str | None] = OrderedDict()
_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class SchemaSize:
    """How much there is to check in a schema, or in several together."""

    parts: int = 0
    """Objects, arrays and booleans, which take 0.2 to 0.4 ms each, and a quarter of the arrays'
    other entries, which take up to 0.05 ms."""
    pattern_chars: int = 0
    """Characters of regular expressions, and of strings that may be some."""

    def __add__(self, other: SchemaSize) -> SchemaSize:
        """Return the size of both."""
        return SchemaSize(self.parts + other.parts, self.pattern_chars + other.pattern_chars)


def object_problem(text: str) -> str | None:
    """Return why ``text`` is not an acceptable JSON object, or None."""
    problem, _ = read_object(text)
    return problem


def schema_problem(text: str) -> str | None:
    """Return why ``text`` is not an acceptable JSON Schema (Draft 2020-12) object, or None."""
    with _lock:
        if text in _known:
            _known.move_to_end(text)
            return _known[text]
    problem = _problem(text)
    with _lock:
        _known[text] = problem
        if len(_known) > _KEPT_SCHEMAS:
            _known.popitem(last=False)
    return problem


def schema_seconds(text: str) -> float:
    """Estimate how long `schema_problem` will take, without reading JSON; 0 if it knows already."""
    if text in _known:
        return 0.0
    parts = sum(map(text.count, ("{", "[", "true", "false"))) + text.count(",") / _ENTRIES_PER_PART
    return min(parts, MAX_SUBSCHEMAS) * _SECONDS_PER_PART


def _problem(text: str) -> str | None:
    problem, schema = read_schema(text)
    if problem is not None:
        return problem
    try:
        error = best_match(islice(_META_VALIDATOR.iter_errors(schema), _MAX_ERRORS_COMPARED))
    except RecursionError:
        return "is too complex"
    return None if error is None else _sentence(error)[:_MAX_ERROR_CHARS]


@lru_cache(maxsize=_KEPT_SCHEMAS)
def schema_size(text: str) -> SchemaSize:
    """Measure a schema before it is checked; one that can't be read has size 0."""
    schema = read_object(text)[1]
    parts = count_parts(schema) + sum(_plain_entries(schema)) // _ENTRIES_PER_PART
    return SchemaSize(parts, sum(_pattern_chars(schema)))


def _plain_entries(value: object) -> Iterator[int]:
    """Yield how many entries of each array are neither objects, arrays nor booleans."""
    if isinstance(value, list):
        yield sum(not isinstance(inner, dict | list | bool) for inner in value)
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _plain_entries(inner)


def _pattern_chars(value: object) -> Iterator[int]:
    """Yield lengths of what may be patterns; data beside the schema, such as defaults, count too.

    The depth is limited by `read_object`.
    """
    if isinstance(value, list):
        for inner in value:
            yield from _pattern_chars(inner)
    if not isinstance(value, dict):
        return
    for key, inner in value.items():
        if key == "pattern" and isinstance(inner, str):
            yield len(inner)
        elif key == "patternProperties" and isinstance(inner, dict):
            yield from map(len, inner)
        yield from _pattern_chars(inner)


def _sentence(error: ValidationError) -> str:
    if isinstance(error.cause, PatternError):
        # It comes first: the path is as long as the client likes.
        shown = str(error.instance)[:_SHOWN_CHARS]
        return f"{error.cause} ({shown!r} at {error.json_path})"
    return f"must be a valid JSON Schema (Draft 2020-12): {error.json_path}: {error.message}"


def _is_regex(value: object) -> bool:
    """See `FormatChecker.checks`; the library's own check compiles with `re`."""
    if isinstance(value, str):
        check_pattern(value)
    return True


def _unique(_: object, wanted: object, value: object, __: object) -> Iterator[ValidationError]:
    """Check `uniqueItems` of names; the library's own check takes 10 s for a wrong 60 KB array.

    In the rules for schemas it stands for arrays of names only; another entry is an error anyway.
    """
    if not (wanted and isinstance(value, list)):
        return
    names = [entry for entry in value if isinstance(entry, str)]
    if len(set(names)) < len(names):
        yield ValidationError("has an entry twice")


_FORMATS = FormatChecker(formats=())
_FORMATS.checkers = {"regex": (_is_regex, PatternError)}
# Of what a client sends, nothing is used as a schema but by this one check: its `pattern`s and
# `patternProperties` match no text here.
_SchemaValidator: Any = extend(  # type: ignore[no-untyped-call]
    Draft202012Validator, {"uniqueItems": _unique}
)


def _rules(schema: Any) -> Any:
    """Return a document of the rules without `$schema`, for which the library's class is taken."""
    return {key: value for key, value in schema.items() if key != "$schema"}


_DOCUMENTS: Any = Registry().with_resources(
    (uri, DRAFT202012.create_resource(_rules(SPECIFICATIONS.contents(uri))))
    for uri in SPECIFICATIONS
    if "/2020-12/" in uri
)
_META_VALIDATOR = _SchemaValidator(
    _rules(Draft202012Validator.META_SCHEMA),
    format_checker=_FORMATS,
    registry=_DOCUMENTS.crawl(),  # else the library's own documents go first
)
