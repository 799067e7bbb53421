"""Regular expressions of response templates, as far as they are markers with some room in them.

Such a pattern is divided into texts, white space, named groups and the rest, which a parser of
markers can use; what else a regular expression can say is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from millstream_server.runtime.frozen import dataclass


class UnmappedTemplateError(ValueError):
    """Our table can't say what a template says; the text names it."""


@dataclass(frozen=True, slots=True)
class Literal:
    """A text."""

    text: str


@dataclass(frozen=True, slots=True)
class Space:
    """White space that may be there or not."""

    newline: bool = False
    """One newline at most."""


@dataclass(frozen=True, slots=True)
class Group:
    """A named group, and the pattern in it."""

    name: str
    inside: str


@dataclass(frozen=True, slots=True)
class Choice:
    """One of several texts, or none if it is ``optional``."""

    texts: tuple[str, ...]
    optional: bool = False
    begins: bool = False
    """The beginning of the answer, too, is one of them."""
    ahead: tuple[str, ...] = ()
    """Texts that may stand behind instead, and aren't part of it."""


@dataclass(frozen=True, slots=True)
class Room:
    """Any text of some kind."""

    pattern: str

    @property
    def may_be_empty(self) -> bool:
        return self.pattern.rstrip("?+").endswith("*") or self.pattern.endswith("?")


Piece = Literal | Space | Group | Choice | Room
Options = list[list[Piece]]
"""What may stand at one side of a field."""
_PIECES = re.compile(
    r"""(?P<edge>\^|\$|\\[AZz])
    |(?P<space>(?:\\s|\\n|\n|\[\\s\\n\]|\[\ \\n\]|\ )(?:[*+]|\?)[?+]?|\\s)
    |(?P<open>\((?:\?P<(?P<name>\w+)>|\?:|\?=)?)
    |(?P<room>(?:\.|\\[wWdDS]|\[\^?\]?(?:\\.|[^\]\\])*\])(?:[*+?][?+]?|\{\d*,?\d*\}\??)?)
    |(?P<literal>\\[nt]|\\[^\w\s]|[^\\^$.|?*+()\[\]{}])(?![*+?{])""",
    re.VERBOSE | re.DOTALL,
)
_PARENTHESES = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|[()|]", re.DOTALL)
_CHARS = {"\\n": "\n", "\\t": "\t"}
_MOST = 512


def pieces(pattern: str) -> list[Piece]:
    """Divide a pattern; what holds only at an end of the answer is left out.

    Raises:
        UnmappedTemplateError: it has something else.
    """
    found: list[Piece] = []
    at = 0
    if len(pattern) > _MOST:
        raise UnmappedTemplateError("a pattern is too long")
    while at < len(pattern):
        read = _PIECES.match(pattern, at)
        if read is None:
            raise UnmappedTemplateError(f"{pattern[at : at + 16]!r} in a pattern")
        at = read.end()
        if read["open"]:
            end = _closing(pattern, at)
            piece, at = _group(read["open"], read["name"], pattern[at:end], pattern[end + 1 :]), end
            at += 2 if pattern[end + 1 : end + 2] == "?" else 1
            found.append(piece)
        elif read["space"]:
            found.append(Space(newline=read["space"].rstrip("+?") in ("\\n", "\n")))
        elif read["room"]:
            found.append(Room(read["room"]))
        elif char := read["literal"]:
            text = _CHARS.get(char, char[-1])
            if found and isinstance(found[-1], Literal):
                text = found.pop().text + text  # type: ignore[union-attr]  # it is a Literal
            found.append(Literal(text))
    return found


def _closing(pattern: str, at: int) -> int:
    """Return where the group ends whose inside begins at ``at``."""
    depth = 1
    for found in _PARENTHESES.finditer(pattern, at):
        depth += {"(": 1, ")": -1}.get(found.group(), 0)
        if not depth:
            return found.start()
    raise UnmappedTemplateError("an open bracket in a pattern")


def _group(opening: str, name: str | None, inside: str, behind: str) -> Group | Choice:
    if name:
        if any(found.group() in "()" for found in _PARENTHESES.finditer(inside)):
            raise UnmappedTemplateError(f"a group in the group {name!r}")
        return Group(name, inside)
    if behind[:1] in {"*", "+", "{"} or opening == "(?=":
        raise UnmappedTemplateError(f"{opening + inside[:16]!r} in a pattern")
    texts: list[str] = []
    ahead: list[str] = []
    begins = False
    options = _options(inside)
    for option in options:
        if option.startswith("(?=") and option.endswith(")"):
            ahead += _texts(option[3:-1])
        elif option in ("^", "\\A"):
            begins = True
        elif option not in ("$", "\\Z", "\\z"):
            texts += _texts(option)
    optional = behind.startswith("?") or "" in options
    return Choice(tuple(texts), optional, begins, tuple(ahead))


def _options(inside: str) -> list[str]:
    """Divide what is in a group at its bars."""
    options, start, depth = [], 0, 0
    for found in _PARENTHESES.finditer(inside):
        depth += {"(": 1, ")": -1}.get(found.group(), 0)
        if found.group() == "|" and not depth:
            options.append(inside[start : found.start()])
            start = found.end()
    return [*options, inside[start:]]


def _texts(pattern: str) -> list[str]:
    return [text for text in (expanded(trimmed(pieces(pattern)))) if text]


def trimmed(given: Sequence[Piece]) -> list[Piece]:
    """Return pieces without white space at both ends."""
    found = list(given)
    while found and isinstance(found[0], Space):
        del found[0]
    while found and isinstance(found[-1], Space):
        del found[-1]
    return found


def expanded(given: Sequence[Piece]) -> list[str]:
    """Return all texts that pieces stand for.

    Raises:
        UnmappedTemplateError: they stand for others, too.
    """
    texts = [""]
    for piece in given:
        if isinstance(piece, Literal):
            texts = [text + piece.text for text in texts]
        elif isinstance(piece, Choice) and not (piece.ahead or piece.begins):
            more = (*piece.texts, "") if piece.optional else piece.texts
            texts = [text + each for text in texts for each in more]
        else:
            raise UnmappedTemplateError("a marker that isn't a text")
    return texts


def alternatives(pattern: str) -> Options:
    """Divide a pattern at its bars, and each part into pieces."""
    return [pieces(option) for option in _options(pattern)]


# ---- the sides of a field


def side(field: Mapping[str, Any], key: str) -> Options:
    """Return what may stand at one side of a field."""
    given = field.get(key)
    if given is None:
        return alternatives(field[f"{key}_pattern"]) if f"{key}_pattern" in field else []
    return [[Literal(text)] for text in ([given] if isinstance(given, str) else given)]


def marker_texts(options: Options) -> tuple[list[str], list[str], bool]:
    """Return markers, those of headers before them, and whether the answer's beginning is one."""
    texts: list[str] = []
    headers: list[str] = []
    begins = False
    for option in options:
        before, rest = lead(option)
        headers += before
        rest = trimmed(rest)
        if len(rest) == 1 and isinstance(rest[0], Choice) and not rest[0].ahead:
            begins |= rest[0].begins
            texts += rest[0].texts
        elif rest:
            texts += expanded(rest)
        else:
            begins = True
    return texts, headers, begins


def lead(option: Sequence[Piece]) -> tuple[list[str], list[Piece]]:
    """Divide what may stand before a marker, with a text behind it that means nothing, from it."""
    headers: list[str] = []
    rest = trimmed(option)
    while len(rest) > 1 and isinstance(rest[0], Choice) and rest[0].optional:
        headers += rest[0].texts
        rest = rest[2:] if isinstance(rest[1], Room) else rest[1:]
    return headers, rest


def runs(option: Sequence[Piece]) -> list[list[str]]:
    """Return the texts of each part of a marker between white space."""
    found: list[list[Piece]] = [[]]
    for piece in trimmed(option):
        if isinstance(piece, Space):
            found.append([])
        else:
            found[-1].append(piece)
    return [expanded(run) for run in found if run]


def once(texts: Iterable[str]) -> tuple[str, ...]:
    """Return each of some texts once."""
    return tuple(dict.fromkeys(texts))
