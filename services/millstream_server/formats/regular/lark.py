"""Reads grammars in Lark's notation, as far as no rule refers to itself."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence

from millstream_server.formats.argument_schema import UnconstrainableError
from millstream_server.formats.regular.chars import Chars, char, written
from millstream_server.formats.regular.regex import MAX_CHARS, rewritten, too_long

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
_CLOSED = {"(": ")", "[": "]"}
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
_END: Token = ("end", "")
_BEHIND = (_END, *[("sign", sign) for sign in "|)]"])


def lark_pattern(source: str) -> str:
    """Return a grammar as a regular expression, for plain text.

    Raises:
        UnconstrainableError: it isn't one, has more than what is regular, or is too long.
    """
    grammar = _Grammar()
    for line in _lines(source):
        grammar.add(line)
    return rewritten(grammar.of(_START))  # groups of JSON's own may come around it


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
        self._made: dict[str, str] = {}
        self._left = 32 * MAX_CHARS
        """Of all patterns, each of which may be a part of others."""
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
            self._made[name] = rewritten(_COMMON[common])

    def of(self, name: str) -> str:
        """Return the pattern of what a name stands for."""
        if name in self._made:
            return self._made[name]
        if name in self._open:
            raise UnconstrainableError(f"the rule {name[:32]!r} refers to itself")
        if name not in self._lines or len(self._open) >= _MAX_DEPTH:
            raise UnconstrainableError(f"the rule {name[:32]!r} is missing, or too deep")
        self._open.append(name)
        found = self._made[name] = _Body(self._lines[name], self).pattern()
        self._open.pop()
        self._left -= len(found)
        if self._left < 0:
            raise too_long()
        return found


class _Body:
    """One definition; what it refers to is a pattern already."""

    def __init__(self, line: Sequence[Token], grammar: _Grammar) -> None:
        self._line = [*line, _END]
        self._grammar = grammar
        self._at = 0

    def _next(self) -> Token:
        self._at = min(self._at + 1, len(self._line))
        return self._line[self._at - 1]

    def _takes(self, *signs: str) -> str:
        kind, text = self._line[self._at]
        found = kind == "sign" and text in signs
        self._at += found
        return text if found else ""

    def pattern(self) -> str:
        pieces: list[str] = []
        opened: list[str] = []
        left = MAX_CHARS
        divided = False
        while (token := self._next()) != _END:
            kind, text = token
            if kind in {"name", "text", "regex"}:
                atom, times = self._atom(kind, text), self._times()
                pieces.append(f"(?:{atom}){times}" if atom and times else atom)
            elif text in _CLOSED:
                opened.append(_CLOSED[text])
                pieces.append("(?:")
            elif opened and text == opened[-1]:
                pieces.append(f"){self._times(optional=opened.pop() == ']')}")
            elif text == "|":
                divided = divided or not opened
                pieces.append(text)
            elif text == "->" and self._next()[0] == "name" and self._line[self._at] in _BEHIND:
                pass  # a name of Lark's tree
            else:
                raise UnconstrainableError(f"{text[:32]!r} is not understood in a grammar")
            left -= len(pieces[-1]) if pieces else 0
            if left < 0:
                raise too_long()
        if opened:
            raise UnconstrainableError("a group of a grammar isn't closed")
        return f"(?:{''.join(pieces)})" if divided else "".join(pieces)

    def _times(self, *, optional: bool = False) -> str:
        """Take how often what stands before comes; ``optional``: it may be missing, too."""
        if sign := self._takes("?", "*", "+"):
            return "*" if optional and sign == "+" else sign
        if not self._takes("~"):
            return "?" if optional else ""
        least = most = self._number()
        if self._takes(".."):
            most = self._number()
        return f"{{{0 if optional else least},{most}}}"

    def _number(self) -> int:
        kind, text = self._next()
        if kind != "number" or len(text) > 3 or text == "0":  # noqa: PLR2004 - below 1000
            raise UnconstrainableError(f"'~ {text[:16]}' is not supported in a grammar")
        return int(text)

    def _atom(self, kind: str, text: str) -> str:
        if kind == "name":
            return self._grammar.of(text)
        if kind == "regex":
            return _regex(text)
        first = _unquoted(text)
        if not self._takes(".."):
            return "".join([written(char(ord(each))) for each in first])
        last = _unquoted(self._next()[1])
        if len(first) != 1 or len(last) != 1 or first > last:
            raise UnconstrainableError(f"{text[:16]}.. is not understood in a grammar")
        return written(Chars(((ord(first), ord(last)),)))


def _unquoted(text: str) -> str:
    if not text.endswith('"'):
        raise UnconstrainableError(f"{text[:32]}: upper and lower case must be written out")
    try:
        return str(ast.literal_eval(text))
    except (ValueError, SyntaxError):
        raise UnconstrainableError(f"{text[:32]} is no text of a grammar") from None


def _regex(text: str) -> str:
    source, _, flags = text[1:].rpartition("/")
    if set(flags) - {"s", "u", "m"}:
        raise UnconstrainableError(f"the flags {flags[:8]!r} of a regular expression")
    return rewritten(source, dot_all="s" in flags)
