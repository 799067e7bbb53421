"""Arguments written as literals of Python, or in a syntax like it, with other quotes and keys."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass

from millstream_server.formats.finder import Finder
from millstream_server.formats.json_text import SPACE, escape, escaped
from millstream_server.formats.reader import Sink
from millstream_server.formats.schema import Tools

_KEY = re.compile(r"[^\s,:=()\[\]{}<>'\"]+")
_WORD = re.compile(r"[A-Za-z_][\w.]*")
_NUMBER = re.compile(r"[0-9A-Za-z_.+-]*")
_WORDS = {"True": "true", "False": "false", "None": "null"} | {
    word: word for word in ("true", "false", "null")
}
_PREFIXES = frozenset(("r", "b", "u", "f", "rb", "br", "R", "B", "U", "F"))
_OPENERS = {"[": ("]", "]", False), "(": (")", "]", False), "{": ("}", "}", True)}
LONGEST_WORD = 512
"""Longer ones make a call an incomplete one."""
_ESCAPE = re.compile(
    r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([0-7]{1,3})|([^xuU0-7]))",
    re.DOTALL,
)
_LONGEST_ESCAPE = 10
_ESCAPED = {"n": "\\n", "t": "\\t", "r": "\\r", "b": "\\b", "f": "\\f", "a": "\\u0007",
            "v": "\\u000b", "\\": "\\\\", '"': '\\"', "'": "'", "\n": ""}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Literals:
    """How they are written."""

    quotes: tuple[str, ...]
    """What stands before and behind a string; of two that begin alike the longer first."""
    escapes: bool = False
    """Backslashes in strings are escapes, as in Python."""
    end: str = "}"
    """What ends the arguments."""

    def body(self, sink: Sink, name: str, tools: Tools) -> LiteralsBody:
        """Read the arguments behind their opening bracket."""
        return LiteralsBody(self, sink)


class LiteralsBody:
    """Makes a JSON object of them; nothing is evaluated."""

    __slots__ = ("_counts", "_frames", "_in_number", "_is_key", "_sink", "_step", "_string",
                 "_style", "broken", "done")  # fmt: skip

    def __init__(self, style: Literals, sink: Sink) -> None:
        self._style = style
        self._sink = sink
        self._frames = [(style.end, "}", True)]
        """What is open: its end here and in JSON, and whether it has keys."""
        self._counts = [0]
        """How many parts each has so far."""
        self._string: tuple[Finder, str] | None = None
        """Inside of a string: where it may end, and its quote."""
        self._is_key = False
        self._in_number = False
        self._step: Callable[[str, int, bool], int] = self._key
        self.done = self.broken = False

    def read(self, text: str, at: int, *, last: bool) -> int:
        """See `Body.read`."""
        end = len(text)
        while at < end and not self.done:
            step, before = self._step, at
            if self._string is not None:
                at = self._in_string(text, at, last)
                if self._string is not None and at == before:
                    break
                continue
            if not self._in_number:
                at = behind_space(text, at)
                if at == end:
                    break
            was = at
            at = step(text, at, last)
            if at == was and step == self._step and self._string is None and not self.done:
                break  # it is held back
        return at

    # ---- the steps: each returns up to where it has read

    def _key(self, text: str, at: int, last: bool) -> int:  # noqa: FBT001 (a step)
        char = text[at]
        if char == self._frames[-1][0]:
            return self._close(at)
        if char == ",":
            return at + 1
        if (opened := self._quote(text, at, last)) is not None:
            self._is_key = True
            return opened
        found = _KEY.match(text, at)
        if found is None:
            return self._break(at)
        if found.end() == len(text) and not last:
            return at if found.end() - at <= LONGEST_WORD else self._break(at)
        self._give(escape(found.group()))
        self._step = self._behind_key
        return found.end()

    def _behind_key(self, text: str, at: int, last: bool) -> int:  # noqa: FBT001 (a step)
        if text[at] not in ":=":
            return self._break(at)
        self._sink.arguments(": ")
        self._step = self._value
        return at + 1

    def _value(self, text: str, at: int, last: bool) -> int:  # noqa: FBT001 (a step)
        char = text[at]
        if char in "-+.0123456789":
            self._give("")
            self._in_number, self._step = True, self._number
            return at
        if (opened := _OPENERS.get(char)) is not None:
            self._give("{" if opened[2] else "[")
            self._frames.append(opened)
            self._counts.append(0)
            self._step = self._key if opened[2] else self._value
            return at + 1
        if char == self._frames[-1][0] and not self._frames[-1][2]:
            return self._close(at)
        if (inside := self._quote(text, at, last)) is not None:
            return inside
        return self._word(text, at, last)

    def _word(self, text: str, at: int, last: bool) -> int:  # noqa: FBT001 (a step)
        found = _WORD.match(text, at)
        if found is None:
            return self._break(at)
        if found.end() == len(text) and not last:
            return at if found.end() - at <= LONGEST_WORD else self._break(at)
        word = found.group()
        if word in _PREFIXES and (opened := self._quote(text, found.end(), last)) is not None:
            return opened if self._string is not None else at
        self._give(_WORDS.get(word) or escape(word))
        self._step = self._behind_value
        return found.end()

    def _number(self, text: str, at: int, last: bool) -> int:  # noqa: FBT001 (a step)
        """Pass digits on; what is no number in JSON makes the call an incomplete one."""
        found = _NUMBER.match(text, at)
        end = at if found is None else found.end()
        if end > at:
            self._sink.arguments(text[at:end].replace("_", ""))
        if end < len(text):
            self._in_number, self._step = False, self._behind_value
        return end

    def _behind_value(self, text: str, at: int, last: bool) -> int:  # noqa: FBT001 (a step)
        char, (end, _, keys) = text[at], self._frames[-1]
        if char == end:
            return self._close(at)
        if char != ",":
            return self._break(at)
        self._step = self._key if keys else self._value
        return at + 1

    # ---- strings

    def _quote(self, text: str, at: int, last: bool) -> int | None:  # noqa: FBT001
        """Begin a string; return where its text is. None: none begins. ``at``: it may."""
        if not last and any(
            len(quote) > len(text) - at and quote.startswith(text[at:])
            for quote in self._style.quotes
        ):
            return at
        for quote in self._style.quotes:
            if text.startswith(quote, at):
                self._give('"')
                self._string = (_string_end(quote, escapes=self._style.escapes), quote)
                return at + len(quote)
        return None

    def _in_string(self, text: str, at: int, last: bool) -> int:  # noqa: FBT001
        if self._string is None:
            return at
        finder, quote = self._string
        found = finder.find(text, at, last=last)
        end = len(text) if found is None else found.start()
        if end > at:
            self._sink.arguments(escaped(text[at:end]))
        if found is None or (marker := found.group(1)) is None:
            return end
        if marker != quote:
            return self._escape(text, end, last)
        self._string = None
        self._sink.arguments('"')
        self._step = self._behind_key if self._is_key else self._behind_value
        self._is_key = False
        return found.end()

    def _escape(self, text: str, at: int, last: bool) -> int:  # noqa: FBT001
        if len(text) - at < _LONGEST_ESCAPE and not last and not _is_whole(text, at):
            return at
        found = _ESCAPE.match(text, at)
        if found is None:  # a backslash that escapes nothing
            self._sink.arguments("\\\\")
            return at + 1
        two, four, eight, octal, char = found.groups()
        if four:
            made = f"\\u{four}"  # as it is: two may make one character
        elif char is not None:
            made = _ESCAPED.get(char) or ("" if char == "\n" else "\\\\" + escaped(char))
        else:
            code = int(octal, 8) if octal else int(two or eight, 16)
            made = escaped(chr(code)) if code < 0x110000 else "\\ufffd"  # noqa: PLR2004
        self._sink.arguments(made)
        return found.end()

    # ---- to the sink

    def _give(self, opening: str) -> None:
        """Give a part's beginning, behind what divides it from the one before."""
        keys = self._frames[-1][2]
        if self._step == self._value and keys:
            divider = ""  # the key had it
        elif self._counts[-1]:
            divider = ", "
        else:
            divider = "{" if len(self._frames) == 1 else ""
        if divider != "" or not (keys and self._step == self._value):
            self._counts[-1] += 1
        if fragment := divider + opening:
            self._sink.arguments(fragment)

    def _close(self, at: int) -> int:
        _, as_json, _ = self._frames.pop()
        empty = not self._frames and not self._counts[-1]
        self._counts.pop()
        self._sink.arguments("{}" if empty else as_json)
        self._step = self._behind_value
        self.done = not self._frames
        return at + 1

    def _break(self, at: int) -> int:
        self.done = self.broken = True
        return at


def behind_space(text: str, at: int) -> int:
    """Return where white space ends."""
    found = SPACE.match(text, at)
    return at if found is None else found.end()


def _is_whole(text: str, at: int) -> bool:
    """Return whether an escape is whole, whatever follows."""
    found = _ESCAPE.match(text, at)
    return found is not None and (found.group(4) is None or found.end() < len(text))


@functools.cache
def _string_end(quote: str, *, escapes: bool) -> Finder:
    return Finder((quote, "\\") if escapes else (quote,))
