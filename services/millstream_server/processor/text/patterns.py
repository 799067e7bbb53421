r"""Checks of regular expressions that clients send in JSON schemas, in linear time.

They are ECMA 262's, as JSON Schema asks for. RE2 compiles them, never `re`, which takes seconds for
a pattern of a few hundred characters. Nothing is matched with the result here: only the syntax is
checked. So before RE2 reads a pattern,

* ECMA's notations that RE2 lacks become characters: `\u00e4`, `\u{1f600}`, `\cA`, `[^]`, `[\b]`;
* Unicode properties become one character: RE2 knows other names than ECMA, and expanding them takes
  0.1 ms each;
* counts above 1 become 1: RE2 refuses those above 1,000, and expanding them takes most of the time;
* look-around becomes a group, and a back-reference an empty one: no engine matches them in linear
  time, but their syntax is as easy to check, and a tool's schema goes to the template only.
"""

from __future__ import annotations

import re

import re2

MAX_PATTERN_CHARS = 4096
"""Of one pattern. Known long ones (addresses, versions, dates) have below 1,500; the slowest known
one of this length takes RE2 some 15 ms."""
_RE2_BYTES = 1 << 20
"""Most memory for a compiled pattern; 4,096 characters without counts stay below it."""

# A part of a pattern, outside and inside of a class. No alternative can begin where another one
# goes on, so any input takes one pass.
_PART = re.compile(
    r"""
      \\u(?P<high>[dD][89abAB][0-9a-fA-F]{2})\\u(?P<low>[dD][c-fC-F][0-9a-fA-F]{2})
    | \\u(?P<four>[0-9a-fA-F]{4})
    | \\u\{(?P<braced>[0-9a-fA-F]{1,8})\}
    | \\x(?P<two>[0-9a-fA-F]{2})
    | \\c(?P<control>[A-Za-z])
    | (?P<property>\\[pP](?:\{\^?[A-Za-z0-9_]{1,64}(?:=[A-Za-z0-9_]{1,64})?\}|[A-Z]))
    | (?P<back>\\[1-9]|\\k<|\(\?P=)
    | (?P<around>\(\?<?[=!])
    | \(\?P?<(?P<name>[^\W\d][\w$]{0,63})>
    | \{(?P<least>[0-9]{1,9})(?P<comma>,(?P<most>[0-9]{1,9})?)?\}
    | (?P<empty>\[\^?\])
    | \\(?P<escaped>.)
    | (?P<plain>.)
    """,
    re.VERBOSE | re.DOTALL,
)
_CLASS_ESCAPES = frozenset("dDwWsSfnrtv")
_ASSERTIONS = {"b": r"\b", "B": r"\B", "A": r"\A", "z": r"\z", "Z": r"\z"}
_LARGEST_CHAR = 0x10FFFF


class PatternError(Exception):
    """A regular expression isn't accepted; the text says why."""


def check_pattern(pattern: str) -> None:
    """Check a regular expression; takes milliseconds for the longest.

    Raises:
        PatternError: it is too long or wrong.
    """
    if len(pattern) > MAX_PATTERN_CHARS:
        raise PatternError(
            f"the regular expression has {len(pattern)} characters; at most {MAX_PATTERN_CHARS} "
            "are allowed"
        )
    options = re2.Options()
    options.max_mem = _RE2_BYTES
    options.log_errors = False
    options.never_capture = True
    try:
        # Not `re2.compile`, which keeps compiled patterns.
        re2._Regexp(_for_re2(pattern), options)  # noqa: SLF001
    except re2.error as error:
        raise PatternError(f"the regular expression is wrong: {_words(error)}") from None


def _words(error: Exception) -> str:
    words = error.args[0] if error.args else ""
    return words.decode(errors="replace") if isinstance(words, bytes) else str(words)


def _for_re2(pattern: str) -> str:
    """Translate a pattern of ECMA 262 to one of RE2 that is as right or wrong.

    Raises:
        PatternError: an escape in it means nothing, or a count counts down.
    """
    parts: list[str] = []
    in_class = False
    for found in _PART.finditer(pattern):
        kind = found.lastgroup or ""
        text = found[0]
        if in_class:
            in_class = not text.endswith("]") or kind == "escaped"
            parts.append(_in_class(found, kind))
        else:
            in_class = text == "["
            parts.append(_outside(found, kind))
    return "".join(parts)


def _outside(found: re.Match[str], kind: str) -> str:
    if kind in ("around", "name"):
        return "(?:"
    if kind == "back":
        return "(?:" if found[0].startswith("(") else "(?:)"
    if kind in ("least", "comma", "most"):
        return _count(found)
    if kind == "escaped":
        escaped = found["escaped"]
        return _ASSERTIONS.get(escaped) or _escape(escaped)
    if kind == "empty":
        return "[a]"
    return _char(found, kind, "[a]")


def _in_class(found: re.Match[str], kind: str) -> str:
    text = found[0]
    if kind == "escaped":
        return r"\x{8}" if found["escaped"] == "b" else _escape(found["escaped"])
    if kind == "back":
        return r"\x{1}" if text.startswith("\\") and text != r"\k<" else _literal(text)
    if kind in ("around", "name", "least", "comma", "most", "empty"):
        # Characters like others here; the bracket that ends `[]` or `[^]` closes the class.
        return _literal(text)
    return r"\[" if text == "[" else _char(found, kind, "a")


def _literal(text: str) -> str:
    return text.replace("[", r"\[")


def _count(found: re.Match[str]) -> str:
    least, most = int(found["least"]), found["most"]
    if most is not None and int(most) < least:
        raise PatternError(f"the regular expression is wrong: {found[0]} counts down")
    upper = "" if most is None else str(min(int(most), 1))
    return f"{{{min(least, 1)}{',' if found['comma'] else ''}{upper}}}"


def _char(found: re.Match[str], kind: str, anything: str) -> str:
    """Return one character of the pattern as RE2 writes it; ``anything`` for a property."""
    if kind == "property":
        return anything
    if kind == "low":
        high, low = int(found["high"], 16), int(found["low"], 16)
        return f"\\x{{{0x10000 + ((high - 0xD800) << 10) + low - 0xDC00:x}}}"
    if kind in ("four", "braced", "two"):
        code = int(found[kind], 16)
        if code > _LARGEST_CHAR:
            raise PatternError(f"the regular expression is wrong: {found[0]} is no character")
        return f"\\x{{{code:x}}}"
    if kind == "control":
        return f"\\x{{{ord(found['control']) % 32:x}}}"
    return found[0]


def _escape(char: str) -> str:
    if char in _CLASS_ESCAPES:
        return f"\\{char}"
    if char == "0":
        return r"\x{0}"
    if char.isascii() and char.isalnum():
        raise PatternError(f"the regular expression is wrong: \\{char} has no meaning")
    return f"\\{char}" if char.isascii() and char != "_" else char
