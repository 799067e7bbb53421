"""Reads regular expressions: what nearly all dialects have in common."""

from __future__ import annotations

import re

from millstream_server.formats.argument_schema import UnconstrainableError
from millstream_server.formats.regular.expressions import (
    Chars,
    Either,
    Expression,
    Joined,
    Range,
    Repeat,
    literal,
)

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
_CONTROLS = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "0": "\0"}
_CODE = re.compile(r"x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|[xu]\{([0-9a-fA-F]{1,6})\}")
_TIMES = re.compile(r"\{(\d+)(,?)(\d*)\}")
_GROUP = re.compile(r"\?(?::|P?<[A-Za-z_]\w*>)")
_ANY = Chars(()).others()
_NO_NEWLINE = Chars(((0x0A, 0x0A),)).others()


def read_regex(source: str, *, dot_all: bool = False) -> Expression:
    """Read an expression that matches a whole text; ``dot_all``: a dot is also a newline.

    Raises:
        UnconstrainableError: it isn't one, or has more than what is regular.
    """
    reader = _Reader(source.removeprefix("^"), dot_all=dot_all)
    found = reader.alternatives()
    if (rest := reader.ahead(16)) not in {"", "$"}:
        raise UnconstrainableError(f"{rest!r} is not understood in a regular expression")
    return found


class _Reader:
    """Reads from the left to the right."""

    def __init__(self, source: str, *, dot_all: bool) -> None:
        self._source = source
        self._dot = _ANY if dot_all else _NO_NEWLINE
        self._at = 0
        self._depth = 0

    def ahead(self, count: int = 1) -> str:
        """Return what comes next, without taking it."""
        return self._source[self._at : self._at + count]

    def _takes(self, text: str) -> bool:
        found = self._source.startswith(text, self._at)
        self._at += len(text) if found else 0
        return found

    def _next(self) -> str:
        if self._at >= len(self._source):
            raise UnconstrainableError("a regular expression ends too early")
        self._at += 1
        return self._source[self._at - 1]

    def _matched(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        found = pattern.match(self._source, self._at)
        self._at = found.end() if found else self._at
        return found

    def alternatives(self) -> Expression:
        parts = [self._joined()]
        while self._takes("|"):
            parts.append(self._joined())
        return parts[0] if len(parts) == 1 else Either(tuple(parts))

    def _joined(self) -> Expression:
        parts: list[Expression] = []
        while self.ahead() not in {"", "|", ")"} and self.ahead(2) != "$":
            parts.append(self._repeated(self._atom()))
        return parts[0] if len(parts) == 1 else Joined(tuple(parts))

    def _repeated(self, part: Expression) -> Expression:
        while (times := self._times()) is not None:
            self._takes("?")  # as few as possible: the same texts
            part = Repeat(part, *times)
        return part

    def _times(self) -> tuple[int, int | None] | None:
        for sign, times in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self._takes(sign):
                return times
        if (found := self._matched(_TIMES)) is None:
            return None
        least = int(found[1])
        most = least if not found[2] else int(found[3]) if found[3] else None
        if max(least, most or 0) > _MOST_TIMES or (most is not None and most < least):
            raise UnconstrainableError(f"{found[0]} in a regular expression")
        return least, most

    def _atom(self) -> Expression:
        char = self._next()
        if char == "(":
            return self._group()
        if char == "[":
            return self._char_class()
        if char == "\\":
            return self._escape()
        if char == ".":
            return self._dot
        if char in "*+?^$":
            raise UnconstrainableError(f"{char!r} is not understood here in a regular expression")
        return literal(char).parts[0]

    def _group(self) -> Expression:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise UnconstrainableError(f"groups nest deeper than {_MAX_DEPTH}")
        if self.ahead() == "?" and self._matched(_GROUP) is None:
            raise UnconstrainableError(
                f"'({self.ahead(3)}' is not supported in a regular expression"
            )
        found = self.alternatives()
        if not self._takes(")"):
            raise UnconstrainableError("a group isn't closed")
        self._depth -= 1
        return found

    def _char_class(self) -> Chars:
        negated = self._takes("^")
        ranges: list[Range] = []
        first = True
        while first or not self._takes("]"):
            first = False
            begin = self._class_part()
            single = len(begin.ranges) == 1 and begin.ranges[0][0] == begin.ranges[0][1]
            if single and self.ahead() == "-" and self.ahead(2) not in {"-]", "-"}:
                self._at += 1
                end = self._class_part().ranges[0][1]
                if end < begin.ranges[0][0]:
                    raise UnconstrainableError("a range of characters goes backwards")
                begin = Chars(((begin.ranges[0][0], end),))
            ranges += begin.ranges
        found = Chars.of(ranges)
        return found.others() if negated else found

    def _class_part(self) -> Chars:
        char = self._next()
        return self._escape() if char == "\\" else Chars(((ord(char), ord(char)),))

    def _escape(self) -> Chars:
        if (code := self._matched(_CODE)) is not None:
            value = int(code[1] or code[2] or code[3], 16)
            return Chars(((value, value),))
        char = self._next()
        if char.lower() in _CLASSES:
            found = _CLASSES[char.lower()]
            return found if char.islower() else found.others()
        if char in _CONTROLS:
            char = _CONTROLS[char]
        elif char.isalnum():
            raise UnconstrainableError(f"'\\{char}' is not supported in a regular expression")
        return Chars(((ord(char), ord(char)),))
