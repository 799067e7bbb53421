"""Characters of regular expressions, and how they are written: for plain text, and for JSON."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

from millstream_server.formats.argument_schema import UnconstrainableError
from millstream_server.runtime.frozen import dataclass

Range = tuple[int, int]
"""The first and the last of some characters."""

_KEPT = 1024
_SURROGATES = (0xD800, 0xDFFF)
_LAST = 0x10FFFF
_LAST_CONTROL = 0x1F
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


def char(code: int) -> Chars:
    """Return one character."""
    return Chars(((code, code),))


def written(chars: Chars, *, in_json: bool = False) -> str:
    """Write characters; ``in_json``: as JSON writes them, between the quotes of a text."""
    (first, last), *more = chars.ranges or ((0, 1),)
    odd = _SURROGATES[0] - 1 <= first <= _SURROGATES[1]
    escaped = in_json and (first <= _LAST_CONTROL or first in _JSON_ESCAPES)
    if first == last and not (more or odd or escaped):
        return _char(first)
    return _chars_in_json(chars) if in_json else _class(chars)


@lru_cache(maxsize=_KEPT)
def _class(chars: Chars) -> str:
    """Write a class of characters, or of those that aren't in it, whichever is shorter."""
    # Half pairs of surrogates are in no text: they needn't be left out.
    ranges, others = _whole(chars), _whole(chars.others())
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


@lru_cache(maxsize=_KEPT)
def _chars_in_json(chars: Chars) -> str:
    """Write characters of a JSON string; control characters without a short escape are left out."""
    escaped = [c for c in _JSON_ESCAPES if any(a <= c <= b for a, b in chars.ranges)]
    never = [(0, _LAST_CONTROL), *((code, code) for code in _JSON_ESCAPES)]
    plain = Chars.of([*chars.others().ranges, *never]).others()
    ways = [_class(plain)] if plain.ranges else []
    ways += [rf"\\{_char(ord(_JSON_ESCAPES[code]))}" for code in escaped]
    if not ways:
        raise UnconstrainableError("it asks for control characters")
    return ways[0] if len(ways) == 1 else f"(?:{'|'.join(ways)})"
