"""Rewrites regular expressions: what nearly all dialects have in common, as engines take it."""

from __future__ import annotations

import re
from typing import Any

from millstream_server.formats.argument_schema import UnconstrainableError
from millstream_server.formats.regular.chars import Chars, Range, char, written

MAX_CHARS = 32 * 1024
"""Longest pattern: engines compile it."""
_MAX_DEPTH = 64
_MOST_TIMES = 1000
_DIGITS: Range = (0x30, 0x39)
_LOWER: Range = (0x61, 0x7A)
_UPPER: Range = (0x41, 0x5A)
_CLASSES = {
    "d": Chars((_DIGITS,)),
    "w": Chars.of([_DIGITS, _LOWER, _UPPER, (0x5F, 0x5F)]),
    "s": Chars.of([(0x09, 0x0D), (0x20, 0x20)]),
}
_CLASSES |= {name.upper(): chars.others() for name, chars in _CLASSES.items()}
_CONTROLS = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "0": "\0"}
_CODE = re.compile(r"x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|[xu]\{([0-9a-fA-F]{1,6})\}")
_TIMES = re.compile(r"(?:[*+?]|\{(\d+)(?:(,)(\d*))?\})")
_GROUP = re.compile(r"\((?:\?(?::|P?<[A-Za-z_]\w*>))?")
_PLAIN = re.compile(r"[A-Za-z0-9_ ]+(?![*+?{])")
_AS_FEW = re.compile(r"\?")
_ANY = Chars(()).others()
_NO_NEWLINE = char(0x0A).others()


def rewritten(source: str, *, in_json: bool = False, dot_all: bool = False) -> str:
    """Return an expression that matches a whole text as it is written for engines.

    ``in_json``: of a text as JSON writes it, between its quotes. ``dot_all``: a dot is also a
    newline.

    Raises:
        UnconstrainableError: it isn't one, has more than what is regular, or is too long.
    """
    reader = _Reader(source.removeprefix("^"), in_json=in_json, dot_all=dot_all)
    return reader.whole()


class _Reader:
    """Reads from the left to the right, each character once."""

    def __init__(self, source: str, *, in_json: bool, dot_all: bool) -> None:
        self._source = source
        self._in_json = in_json
        self._dot = _ANY if dot_all else _NO_NEWLINE
        self._at = 0

    def _next(self) -> str:
        if self._at >= len(self._source):
            raise UnconstrainableError("a regular expression ends too early")
        self._at += 1
        return self._source[self._at - 1]

    def _matched(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        found = pattern.match(self._source, self._at)
        self._at = found.end() if found else self._at
        return found

    def whole(self) -> str:
        pieces: list[str] = []
        depth, left = 0, MAX_CHARS
        divided = repeatable = False
        while (ahead := self._source[self._at : self._at + 16]) not in {"", "$"}:
            first = ahead[0]
            if first == "|":
                divided, repeatable = divided or not depth, False
                pieces.append(self._next())
            elif first == ")" and depth:
                depth, repeatable = depth - 1, True
                pieces.append(self._next())
            elif first == "(":
                depth, repeatable = depth + 1, False
                pieces.append(self._opened(depth, ahead))
            elif times := self._times():
                if not repeatable:
                    raise _not_understood(ahead)
                repeatable = False
                single = self._in_json and pieces[-1] != ")"
                pieces.append(f"(?:{pieces.pop()}){times}" if single else times)
            elif first in "^$)":
                raise _not_understood(ahead)
            else:
                repeatable = True
                plain = self._matched(_PLAIN)
                chars = plain[0] if plain else written(self._chars(), in_json=self._in_json)
                pieces.append(chars)
            left -= len(pieces[-1])
            if left < 0:
                raise too_long()
        if depth:
            raise UnconstrainableError("a group isn't closed")
        return f"(?:{''.join(pieces)})" if divided else "".join(pieces)

    def _opened(self, depth: int, ahead: str) -> str:
        if self._matched(_GROUP) is None or self._source.startswith("?", self._at):
            raise _unsupported(ahead[:4])
        if depth > _MAX_DEPTH:
            raise UnconstrainableError(f"groups nest deeper than {_MAX_DEPTH}")
        return "(?:"

    def _times(self) -> str:
        """Take how often what stands before comes; return nothing if that isn't said."""
        if (found := self._matched(_TIMES)) is None:
            return ""
        least, most = (int(each) if each else None for each in found.group(1, 3))
        self._matched(_AS_FEW)  # the same texts
        if least is None:
            return found[0]
        most = most if found[2] else least
        if max(least, most or 0) > _MOST_TIMES or (most is not None and most < least):
            raise UnconstrainableError(f"{found[0]} in a regular expression")
        return f"{{{least},{'' if most is None else most}}}"

    def _chars(self) -> Chars:
        first = self._next()
        if first == "[":
            return self._char_class()
        if first == "\\":
            return self._escape()
        return self._dot if first == "." else char(ord(first))

    def _char_class(self) -> Chars:
        negated = self._source.startswith("^", self._at)
        self._at += negated
        ranges: list[Range] = []
        first = True
        while first or not self._source.startswith("]", self._at):
            first = False
            begin = self._class_part()
            ahead = self._source[self._at : self._at + 2]
            single = len(begin.ranges) == 1 and begin.ranges[0][0] == begin.ranges[0][1]
            if single and ahead[:1] == "-" and ahead not in {"-]", "-"}:
                self._at += 1
                end = self._class_part().ranges[0][1]
                if end < begin.ranges[0][0]:
                    raise UnconstrainableError("a range of characters goes backwards")
                begin = Chars(((begin.ranges[0][0], end),))
            ranges += begin.ranges
        self._at += 1
        found = Chars.of(ranges)
        return found.others() if negated else found

    def _class_part(self) -> Chars:
        first = self._next()
        return self._escape() if first == "\\" else char(ord(first))

    def _escape(self) -> Chars:
        if (code := self._matched(_CODE)) is not None:
            return char(int(code[1] or code[2] or code[3], 16))
        name = self._next()
        if name in _CLASSES:
            return _CLASSES[name]
        if name.isalnum() and name not in _CONTROLS:
            raise _unsupported(f"\\{name}")
        return char(ord(_CONTROLS.get(name, name)))


def too_long() -> UnconstrainableError:
    """Return the refusal of a pattern."""
    return UnconstrainableError(f"as a regular expression it exceeds {MAX_CHARS} characters")


def _not_understood(what: str) -> UnconstrainableError:
    return UnconstrainableError(f"{what!r} is not understood in a regular expression")


def _unsupported(what: str) -> UnconstrainableError:
    return UnconstrainableError(f"'{what}' is not supported in a regular expression")


# ---- of JSON Schemas -----------------------------------------------------------------------------

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
        return rewritten(pattern, in_json=True)
    except UnconstrainableError:
        return pattern
