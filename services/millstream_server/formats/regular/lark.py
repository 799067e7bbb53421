"""Reads grammars in Lark's notation, as far as no rule refers to itself."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence

from millstream_server.formats.argument_schema import UnconstrainableError
from millstream_server.formats.regular.expressions import (
    Chars,
    Either,
    Expression,
    Joined,
    Repeat,
    literal,
)
from millstream_server.formats.regular.regex import read_regex

_START = "start"
_MAX_DEPTH = 64
_TOKEN = re.compile(
    r"""(?P<space>[ \t\r]+|//[^\n]*)
    |(?P<newline>\n)
    |(?P<directive>%[a-z]+)
    |(?P<name>[?!]?_?[A-Za-z][A-Za-z0-9_]*)
    |(?P<text>"(?:[^"\\\n]|\\.)*"(?P<flag>i?))
    |(?P<regex>/(?:[^/\\\n]|\\.)+/(?P<flags>[a-z]*))
    |(?P<number>\d+)
    |(?P<sign>->|\.\.|[|()\[\]?*+:~,.])""",
    re.VERBOSE,
)
_TIMES: Mapping[str, tuple[int, int | None]] = {"?": (0, 1), "*": (0, None), "+": (1, None)}
_COMMON = {
    "DIGIT": "[0-9]",
    "HEXDIGIT": "[0-9a-fA-F]",
    "INT": "[0-9]+",
    "SIGNED_INT": "[+-]?[0-9]+",
    "DECIMAL": r"[0-9]+\.[0-9]*|\.[0-9]+",
    "FLOAT": r"[0-9]+[eE][+-]?[0-9]+|(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?",
    "NUMBER": r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?",
    "SIGNED_NUMBER": r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?",
    "ESCAPED_STRING": r'"(?:[^"\\\n]|\\.)*"',
    "LCASE_LETTER": "[a-z]",
    "UCASE_LETTER": "[A-Z]",
    "LETTER": "[a-zA-Z]",
    "WORD": "[a-zA-Z]+",
    "CNAME": "[a-zA-Z_][a-zA-Z0-9_]*",
    "WS_INLINE": r"[ \t]+",
    "WS": r"[ \t\f\r\n]+",
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(?:\r?\n)+",
}
"""Of Lark's own library."""

Token = tuple[str, str]
"""Its kind and its text."""


def read_lark(source: str) -> Expression:
    """Read a grammar.

    Raises:
        UnconstrainableError: it isn't one, or has more than what is regular.
    """
    grammar = _Grammar()
    for line in _lines(source):
        grammar.add(line)
    return grammar.of(_START)


def _lines(source: str) -> list[list[Token]]:
    """Divide a grammar into definitions: a line that begins with a bar continues the one before."""
    lines: list[list[Token]] = [[]]
    at = 0
    while at < len(source):
        found = _TOKEN.match(source, at)
        if found is None:
            raise UnconstrainableError(f"{source[at : at + 16]!r} is not understood in a grammar")
        at = found.end()
        kind = found.lastgroup or ""
        for each in ("text", "regex"):  # their flags are the last group
            kind = each if found[each] is not None else kind
        if kind == "newline":
            lines.append([])
        elif kind != "space":
            goes_on = not lines[-1] and found[0] == "|"
            while goes_on and len(lines) > 1 and not lines[-1]:
                lines.pop()
            lines[-1].append((kind, found[0]))
    return [line for line in lines if line]


class _Grammar:
    """Definitions by their names."""

    def __init__(self) -> None:
        self._lines: dict[str, Sequence[Token]] = {}
        self._made: dict[str, Expression] = {}
        self._open: list[str] = []
        """The names that are being made: they may not come again."""

    def add(self, line: Sequence[Token]) -> None:
        kind, text = line[0]
        if kind == "directive":
            self._import(text, [token for _, token in line[1:]])
            return
        # Behind a name, and a priority with its dot, if it has one.
        colon = next((at for at, token in enumerate(line[:4]) if token == ("sign", ":")), 0)
        if kind != "name" or not colon:
            raise UnconstrainableError(f"a definition of a grammar can't begin with {text[:32]!r}")
        self._lines[text.lstrip("?!")] = line[colon + 1 :]

    def _import(self, directive: str, words: Sequence[str]) -> None:
        if directive != "%import" or words[:2] not in (["common", "."], ["common", "("]):
            raise UnconstrainableError(f"{' '.join([directive, *words])[:48]!r} is not supported")
        if words[1] == "(":
            names = {name: name for name in words[2:-1] if name != ","}
        else:
            names = {words[-1]: words[2]}
        for name, common in names.items():
            if common not in _COMMON:
                raise UnconstrainableError(f"common.{common[:32]} is not supported")
            self._made[name] = read_regex(_COMMON[common])

    def of(self, name: str) -> Expression:
        """Return what a name stands for."""
        if name in self._made:
            return self._made[name]
        if name in self._open:
            raise UnconstrainableError(f"the rule {name[:32]!r} refers to itself")
        if name not in self._lines or len(self._open) >= _MAX_DEPTH:
            raise UnconstrainableError(f"the rule {name[:32]!r} is missing, or too deep")
        self._open.append(name)
        reader = _Reader(self._lines[name], self)
        self._made[name] = reader.whole()
        self._open.pop()
        return self._made[name]


class _Reader:
    """Reads one definition."""

    def __init__(self, line: Sequence[Token], grammar: _Grammar) -> None:
        self._line = [*line, ("end", "")]
        self._grammar = grammar
        self._at = 0
        self._depth = 0

    def _takes(self, *signs: str) -> str:
        kind, text = self._line[self._at]
        if kind != "sign" or text not in signs:
            return ""
        self._at += 1
        return text

    def _next(self) -> Token:
        self._at += 1
        return self._line[self._at - 1]

    def whole(self) -> Expression:
        found = self._alternatives()
        if (token := self._line[self._at]) != ("end", ""):
            raise UnconstrainableError(f"{token[1][:32]!r} is not understood in a grammar")
        return found

    def _alternatives(self) -> Expression:
        parts = [self._joined()]
        while self._takes("|"):
            parts.append(self._joined())
        return parts[0] if len(parts) == 1 else Either(tuple(parts))

    def _joined(self) -> Expression:
        parts: list[Expression] = []
        while self._line[self._at] not in {
            ("end", ""),
            ("sign", "|"),
            ("sign", ")"),
            ("sign", "]"),
        }:
            if self._takes("->"):
                self._next()  # a name of Lark's tree
                break
            parts.append(self._repeated(self._atom()))
        return parts[0] if len(parts) == 1 else Joined(tuple(parts))

    def _repeated(self, part: Expression) -> Expression:
        if sign := self._takes("?", "*", "+"):
            return Repeat(part, *_TIMES[sign])
        if not self._takes("~"):
            return part
        least = most = self._number()
        if self._takes(".."):
            most = self._number()
        return Repeat(part, least, most)

    def _number(self) -> int:
        kind, text = self._next()
        if kind != "number" or len(text) > 3 or text == "0":  # noqa: PLR2004 - below 1000
            raise UnconstrainableError(f"'~ {text[:16]}' is not supported in a grammar")
        return int(text)

    def _atom(self) -> Expression:
        kind, text = self._next()
        if kind == "name":
            return self._grammar.of(text)
        if kind == "text":
            return self._text(text)
        if kind == "regex":
            return _regex(text)
        if text in {"(", "["}:
            return self._group(text)
        raise UnconstrainableError(f"{text[:32]!r} is not understood in a grammar")

    def _text(self, text: str) -> Expression:
        if self._takes(".."):
            first, last = _unquoted(text), _unquoted(self._next()[1])
            if len(first) != 1 or len(last) != 1 or first > last:
                raise UnconstrainableError(f"{text[:16]}.. is not understood in a grammar")
            return Chars(((ord(first), ord(last)),))
        return literal(_unquoted(text))

    def _group(self, opened: str) -> Expression:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise UnconstrainableError(f"groups nest deeper than {_MAX_DEPTH}")
        found = self._alternatives()
        if not self._takes(")" if opened == "(" else "]"):
            raise UnconstrainableError("a group of a grammar isn't closed")
        self._depth -= 1
        return found if opened == "(" else Repeat(found, 0, 1)


def _unquoted(text: str) -> str:
    if not text.endswith('"'):
        raise UnconstrainableError(f"{text[:32]}: upper and lower case must be written out")
    try:
        return str(ast.literal_eval(text))
    except (ValueError, SyntaxError):
        raise UnconstrainableError(f"{text[:32]} is no text of a grammar") from None


def _regex(text: str) -> Expression:
    source, _, flags = text[1:].rpartition("/")
    if set(flags) - {"s", "u", "m"}:
        raise UnconstrainableError(f"the flags {flags[:8]!r} of a regular expression")
    return read_regex(source, dot_all="s" in flags)
