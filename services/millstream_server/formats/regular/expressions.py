"""Regular expressions as data, and how they are written: for plain text, and for JSON strings."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from millstream_server.formats.argument_schema import UnconstrainableError
from millstream_server.runtime.frozen import dataclass

Range = tuple[int, int]
"""The first and the last of some characters."""

_MAX_CHARS = 32 * 1024
"""Longest pattern: engines compile it."""
_SURROGATES = (0xD800, 0xDFFF)
_LAST = 0x10FFFF
_SPECIAL = re.compile(r"[\\^$.|?*+(){}\[\]\-]")
_NAMED = {0x09: r"\t", 0x0A: r"\n", 0x0D: r"\r"}
_JSON_ESCAPES = {
    0x22: '"',
    0x5C: "\\",
    0x08: "b",
    0x0C: "f",
    0x0A: "n",
    0x0D: "r",
    0x09: "t",
}
"""What stands for a character behind a backslash."""


@dataclass(frozen=True, slots=True)
class Chars:
    """One of some characters; the ranges are in order, and apart."""

    ranges: tuple[Range, ...]

    @classmethod
    def of(cls, ranges: Sequence[Range]) -> Chars:
        """Make it of ranges in any order."""
        joined: list[Range] = []
        for first, last in sorted(ranges):
            if joined and first <= joined[-1][1] + 1:
                joined[-1] = (joined[-1][0], max(last, joined[-1][1]))
            else:
                joined.append((first, last))
        return cls(tuple(joined))

    def others(self) -> Chars:
        """Return all other characters."""
        found, begin = [], 0
        for first, last in (*Chars.of([*self.ranges, _SURROGATES]).ranges, (_LAST + 1, 0)):
            if begin < first:
                found.append((begin, first - 1))
            begin = last + 1
        return Chars(tuple(found))


@dataclass(frozen=True, slots=True)
class Joined:
    """One behind the other."""

    parts: tuple[Expression, ...]


@dataclass(frozen=True, slots=True)
class Either:
    """One of some."""

    parts: tuple[Expression, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """One several times; ``most`` None: any number."""

    part: Expression
    least: int
    most: int | None


Expression = Chars | Joined | Either | Repeat


def literal(text: str) -> Joined:
    """Return what matches a text."""
    return Joined(tuple(Chars(((ord(char), ord(char)),)) for char in text))


def pattern_of(expression: Expression, *, in_json: bool = False) -> str:
    """Write an expression; ``in_json``: of a text as JSON writes it, between its quotes.

    Raises:
        UnconstrainableError: it would be too long.
    """
    pieces: list[str] = []
    left = _MAX_CHARS
    for piece in _written(expression, in_json=in_json):
        left -= len(piece)
        if left < 0:
            raise UnconstrainableError(
                f"as a regular expression it exceeds {_MAX_CHARS} characters"
            )
        pieces.append(piece)
    return "".join(pieces)


def _written(expression: Expression, *, in_json: bool) -> Iterator[str]:
    match expression:
        case Chars():
            yield _chars_in_json(expression) if in_json else _class(expression)
        case Joined(parts):
            for part in parts:
                yield from _written(part, in_json=in_json)
        case Either(parts):
            for index, part in enumerate(parts):
                yield "|" if index else "(?:"
                yield from _written(part, in_json=in_json)
            yield ")"
        case Repeat(Chars(), least, most) if not in_json:
            yield from _written(expression.part, in_json=False)
            yield _times(least, most)
        case Repeat(part, least, most):
            yield "(?:"
            yield from _written(part, in_json=in_json)
            yield f"){_times(least, most)}"


def _times(least: int, most: int | None) -> str:
    if most is None:
        return {0: "*", 1: "+"}.get(least, f"{{{least},}}")
    return "?" if (least, most) == (0, 1) else f"{{{least},{most}}}"


def _class(chars: Chars) -> str:
    """Write a class of characters, or of those that aren't in it, whichever is shorter."""
    # Half pairs of surrogates are in no text: they needn't be left out.
    ranges, others = _whole(chars), _whole(chars.others())
    if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
        return _char(ranges[0][0])
    if others and len(others) < len(ranges):
        return f"[^{_ranges(others)}]"
    return f"[{_ranges(ranges)}]"


def _whole(chars: Chars) -> tuple[Range, ...]:
    around = [(first, last) for first, last in chars.ranges if last >= _SURROGATES[0] - 1]
    return Chars.of([*chars.ranges, *([_SURROGATES] if around else [])]).ranges


def _ranges(ranges: Sequence[Range]) -> str:
    return "".join([_char(a) if a == b else f"{_char(a)}-{_char(b)}" for a, b in ranges])


def _char(code: int) -> str:
    if code in _NAMED:
        return _NAMED[code]
    if not chr(code).isprintable():
        return f"\\u{{{max(code, 1):x}}}"  # xgrammar takes no NUL
    return _SPECIAL.sub(r"\\\g<0>", chr(code))


def _chars_in_json(chars: Chars) -> str:
    """Write characters of a JSON string; control characters without a short escape are left out."""
    escaped = [code for code in _JSON_ESCAPES if _has(chars, code)]
    never = [(0, 0x1F), *((code, code) for code in _JSON_ESCAPES)]
    plain = Chars.of([*chars.others().ranges, *never]).others()
    ways = [_class(plain)] if plain.ranges else []
    ways += [rf"\\{_char(ord(_JSON_ESCAPES[code]))}" for code in escaped]
    if not ways:
        raise UnconstrainableError("it asks for control characters")
    return ways[0] if len(ways) == 1 else f"(?:{'|'.join(ways)})"


def _has(chars: Chars, code: int) -> bool:
    return any(first <= code <= last for first, last in chars.ranges)
