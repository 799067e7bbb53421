"""Parts of a structural tag, xgrammar's form of a grammar; xgrammar itself needs torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from millstream_server.formats.regular.regex import with_json_patterns

Part = dict[str, Any]

NOTHING: Part = {"type": "const_string", "value": ""}
MOST_SPACE = 2
"""Most white space characters in a row between the parts of arguments that are JSON."""
ANSWER_SPACE = 16
"""The same of an answer's text: it may be indented."""


def const(text: str) -> Part:
    """Match a text."""
    return {"type": "const_string", "value": text}


def regex(pattern: str) -> Part:
    """Match a regular expression, whole."""
    return {"type": "regex", "pattern": pattern}


def ebnf(grammar: str) -> Part:
    """Match a grammar in extended Backus-Naur form, whole."""
    return {"type": "grammar", "grammar": grammar}


def text(without: Iterable[str], most: int | None = None, tokens: int | None = None) -> Part:
    """Match any text without some others; at most so many characters, or tokens, of it."""
    part: Part = {"type": "any_text", "excludes": list(dict.fromkeys(without))}
    if most is not None:
        part["max_chars"] = most
    if tokens is not None:
        part["max_tokens"] = tokens
    return part


def json_value(schema: Mapping[str, Any], space: int = MOST_SPACE) -> Part:
    """Match JSON that a schema allows."""
    kept = with_json_patterns(schema)
    return {"type": "json_schema", "json_schema": kept, "max_whitespace_cnt": space}


def size_of(part: Any, known: dict[int, int]) -> int:
    """Count objects and arrays as JSON writes them: what several hold counts each time.

    ``known`` has what was counted, by `id`.
    """
    if not isinstance(part, dict | list):
        return 0
    if id(part) not in known:
        found = 1
        for each in part.values() if isinstance(part, dict) else part:
            found += size_of(each, known)
        known[id(part)] = found
    return known[id(part)]


def sequence(*parts: Part) -> Part:
    """Match one behind the other; neighbouring texts become one."""
    joined: list[Part] = []
    for part in parts:
        for each in part["elements"] if part["type"] == "sequence" else (part,):
            if each == NOTHING:
                continue
            if joined and each["type"] == joined[-1]["type"] == "const_string":
                joined[-1] = const(joined[-1]["value"] + each["value"])
            else:
                joined.append(each)
    if len(joined) == 1:
        return joined[0]
    return {"type": "sequence", "elements": joined} if joined else NOTHING


def either(parts: Sequence[Part]) -> Part:
    """Match one of them."""
    return parts[0] if len(parts) == 1 else {"type": "or", "elements": list(parts)}


def optional(part: Part) -> Part:
    """Match it or nothing."""
    return {"type": "optional", "content": part}


def star(part: Part) -> Part:
    """Match it any number of times."""
    return {"type": "star", "content": part}


def repeat(part: Part, least: int, most: int | None) -> Part:
    """Match it so many times; None: any number."""
    if most == 0:
        return NOTHING
    return {"type": "repeat", "min": least, "max": -1 if most is None else most, "content": part}


def tag(begin: str, content: Part, end: str) -> Part:
    """Match it between two texts; free text in it ends at the second."""
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def tagged(part: Part) -> Part:
    """Make a tag, which lists need, of what begins with a text and has no free text at its end."""
    if part["type"] == "tag":
        return part
    elements = part["elements"] if part["type"] == "sequence" else [part]
    first, *rest = elements
    if first["type"] != "const_string":
        return tag("", part, "")
    end = ""
    if rest and rest[-1]["type"] == "const_string":
        *rest, last = rest
        end = last["value"]
    return tag(first["value"], sequence(*rest), end)
