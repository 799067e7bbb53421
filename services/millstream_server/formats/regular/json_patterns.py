"""The patterns of a JSON Schema as engines need them: of strings as JSON writes them."""

from __future__ import annotations

from typing import Any

from millstream_server.formats.argument_schema import UnconstrainableError
from millstream_server.formats.regular.expressions import pattern_of
from millstream_server.formats.regular.regex import read_regex

_DATA = frozenset(("const", "default", "enum", "examples"))
"""Keywords whose values are no schemas."""


def with_json_patterns(node: Any) -> Any:
    """Return a schema whose patterns match what stands between the quotes of JSON.

    xgrammar puts a pattern there as it is: one that admits a newline or a quote would break the
    JSON. Patterns that aren't understood here stay as they are.
    """
    if isinstance(node, list):
        return [with_json_patterns(each) for each in node]
    if not isinstance(node, dict):
        return node
    found = {key: part if key in _DATA else with_json_patterns(part) for key, part in node.items()}
    if isinstance(pattern := node.get("pattern"), str):
        found["pattern"] = _in_json(pattern)
    return found


def _in_json(pattern: str) -> str:
    try:
        return pattern_of(read_regex(pattern), in_json=True)
    except UnconstrainableError:
        return pattern
