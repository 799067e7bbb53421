"""Whether a grammar's shape is safe to compile. If it is correct, the engine says."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from millstream_server.generation.sampling import Constraint, ConstraintKind
from millstream_server.runtime.json_bounds import (
    read_object,
    read_schema,
    schema_problem,
    size_problem,
)

MAX_CONSTRAINT_BYTES = 64 * 1024
MAX_CONSTRAINT_DEPTH = 128
"""Deepest nesting of parentheses in a regex or an EBNF grammar."""
MAX_STRUCTURAL_TAG_BYTES = 256 * 1024
"""It may hold the schemas of many tools."""
MAX_STRUCTURAL_TAG_DEPTH = 64
MAX_STRUCTURAL_TAG_PARTS = 16384
"""Objects, arrays and booleans: an argument that isn't JSON takes some ten."""

# Text in which parentheses don't count (escapes, character classes, EBNF's strings and comments),
# or a parenthesis. Possessive, so that any input takes one pass.
_CLASS = r"\[(?:[^\]\\]|\\.)*+\]?"
_PARENTHESES = {
    ConstraintKind.REGEX: re.compile(rf"\\.|{_CLASS}|[()]", re.DOTALL),
    ConstraintKind.EBNF: re.compile(rf'"(?:[^"\\\n]|\\.)*+"?|#[^\n]*+|{_CLASS}|[()]', re.DOTALL),
}
# Of each format of a structural tag the field with the formats in it, or with its source. Formats
# of single tokens are missing: xgrammar's cache mixes them up (seen in 0.2.1 to 0.2.7).
_PARTS = {
    "sequence": "elements",
    "or": "elements",
    "triggered_tags": "tags",
    "tags_with_separator": "tags",
    "tag": "content",
    "optional": "content",
    "plus": "content",
    "star": "content",
    "repeat": "content",
    "dispatch": "rules",
}
_SOURCES = {
    "const_string": "value",
    "json_schema": "json_schema",
    "regex": "pattern",
    "grammar": "grammar",
}
_FORMATS = frozenset((*_PARTS, *_SOURCES, "any_text"))


def max_bytes(kind: ConstraintKind) -> int:
    """Return how long a grammar may be."""
    if kind is ConstraintKind.STRUCTURAL_TAG:
        return MAX_STRUCTURAL_TAG_BYTES
    return MAX_CONSTRAINT_BYTES


# Cached: a grammar is checked for every choice and leg, and clients send the same few often.
@lru_cache(maxsize=64)
def shape_problem(constraint: Constraint) -> str | None:
    """Return why a grammar isn't safe to compile, or None; the engine checks if it is correct.

    Takes up to 20 ms for 64 KiB of JSON: call it in a thread first where an event loop must go on,
    and `check_request` then has the result at once.
    """
    kind, source = constraint.kind, constraint.source
    if kind is ConstraintKind.JSON_SCHEMA:
        problem, _ = read_schema(source)
    elif kind is ConstraintKind.STRUCTURAL_TAG:
        problem = _tag_problem(source)
    else:
        problem = _depth_problem(kind, source)
    return f"{kind.value} {problem}" if problem else None


def _depth_problem(kind: ConstraintKind, source: str) -> str | None:
    depth = 0
    for found in _PARENTHESES[kind].finditer(source):
        depth = max(depth + {"(": 1, ")": -1}.get(found[0], 0), 0)
        if depth > MAX_CONSTRAINT_DEPTH:
            return f"must not nest deeper than {MAX_CONSTRAINT_DEPTH}"
    return None


def _tag_problem(source: str) -> str | None:
    problem, tag = read_object(
        source, max_bytes=MAX_STRUCTURAL_TAG_BYTES, max_depth=MAX_STRUCTURAL_TAG_DEPTH
    )
    problem = problem or size_problem(tag, MAX_STRUCTURAL_TAG_PARTS)
    if problem is None and (tag.get("type"), len(tag)) != ("structural_tag", 2):
        problem = 'must have "type": "structural_tag" and "format", nothing else'
    return problem or next(_format_problems(tag.get("format"), "format"), None)


def _format_problems(form: Any, at: str) -> Iterator[str]:
    """Yield what is wrong with a format, which stands at the path ``at`` of the tag."""
    kind = form.get("type") if isinstance(form, dict) else None
    if not isinstance(kind, str) or kind not in _FORMATS:
        yield f"needs, as {at}.type, one of {', '.join(sorted(_FORMATS))}"
    elif kind in _PARTS:
        yield from _part_problems(kind, form.get(_PARTS[kind]), f"{at}.{_PARTS[kind]}")
    elif kind in _SOURCES:
        field = _SOURCES[kind]
        if problem := _source_problem(kind, form.get(field)):
            yield f"{problem}: {at}.{field}"


def _part_problems(kind: str, parts: Any, at: str) -> Iterator[str]:
    if _PARTS[kind] == "content":
        yield from _format_problems(parts, at)
        return
    if not isinstance(parts, list) or not parts:
        yield f"needs a list that isn't empty: {at}"
        return
    for index, part in enumerate(parts):
        here = f"{at}[{index}]"
        if _PARTS[kind] == "rules":
            if not isinstance(part, list) or [type(each) for each in part[:1]] != [str]:
                yield f"needs a text and a format: {here}"
            else:
                yield from _format_problems(part[1] if len(part) > 1 else None, f"{here}[1]")
        elif _PARTS[kind] == "tags" and (not isinstance(part, dict) or part.get("type") != "tag"):
            yield f"needs a tag: {here}"
        else:
            yield from _format_problems(part, here)


def _source_problem(kind: str, source: Any) -> str | None:
    if kind == "json_schema":
        if isinstance(source, bool):
            return None
        return schema_problem(source) if isinstance(source, dict) else "needs a JSON Schema"
    if not isinstance(source, str):
        return "needs a text"
    if kind == "regex":
        return _depth_problem(ConstraintKind.REGEX, source)
    return _depth_problem(ConstraintKind.EBNF, source) if kind == "grammar" else None
