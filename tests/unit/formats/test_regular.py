"""Grammars of custom tools: read, written as patterns, and kept by xgrammar in both notations."""

from __future__ import annotations

import contextlib
import json
import random
import re
from typing import Any

import pytest

from millstream_server.formats.argument_schema import UnconstrainableError
from millstream_server.formats.families import FORMATS
from millstream_server.formats.regular.lark import lark_pattern
from millstream_server.formats.regular.regex import rewritten
from millstream_server.formats.tags import Tool, Wanted, structural_tag
from tests.support.steps import steps
from tests.support.walks import Tag

PATCH = r"""
// As an editor's: several files, each with its lines.
start: begin file+ "*** End" LF?
begin: "*** Begin" LF
file: add
    | "*** Delete: " name LF
add.2: "*** Add: " name LF line~1..3 -> added
?name: /(.+)/
line: ("+" | "-" | " ") /(.*)/ LF [mark]
mark: "@" "0".."9" WORD LF
%import common.LF
%import common (WORD, NUMBER)
"""
GOOD = [
    '*** Begin\n*** Delete: a "b" \\ é\U0001f600\n*** End',
    "*** Begin\n*** Add: x\n+\t1\n-\n@3ab\n*** Delete: y\n*** End\n",
]
BAD = [
    "*** Begin\n*** End",
    "*** Begin\n*** Add: x\n*** End",
    "*** Begin\n*** Add: x\n+1\n+2\n+3\n+4\n*** End",
    "*** Begin\n*** Add: x\n+1\n@33\n*** End",
]


def tag(name: str, pattern: str) -> Tag:
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {"input": {"type": "string", "pattern": pattern}},
        "required": ["input"],
        "additionalProperties": False,
    }
    source = structural_tag(FORMATS[name], Wanted(tools=(Tool("p", schema, strict=True),)))
    assert source is not None
    return Tag(source)


def said(name: str, text: str) -> str:
    if name == "hermes":
        call = json.dumps({"name": "p", "arguments": {"input": text}}, ensure_ascii=False)
        return f"<tool_call>\n{call}\n</tool_call>"
    argument = f"<parameter=input>\n{text}\n</parameter>"
    return f"<tool_call>\n<function=p>\n{argument}\n</function>\n</tool_call>"


@pytest.mark.parametrize("name", ["hermes", "qwen-xml"])
def test_a_grammar_holds_in_json_and_in_plain_text(name: str) -> None:
    kept = tag(name, lark_pattern(PATCH))
    assert [kept.admits(said(name, text)) for text in GOOD] == [True, True]
    assert [kept.admits(said(name, text)) for text in BAD] == [False] * 4


def test_what_is_written_matches_the_same_texts() -> None:
    written = re.compile(lark_pattern(PATCH))
    assert all(written.fullmatch(text) for text in GOOD)
    assert not any(written.fullmatch(text) for text in BAD)


SOURCES = [
    r"a|b*c?",
    r"(?:ab|c){2,3}?",
    r"^[a-c\]\-^]+$",
    r"[^ab\n]x{2,}",
    r"\d\D\w\W\s\S",
    r"(?P<n>\x61\u0062)\.\/.",
    r"[\w.-]+\\",
    r"a||b",
]


@pytest.mark.parametrize("source", SOURCES)
def test_expressions_match_as_pythons_do(source: str) -> None:
    ours, python = re.compile(rewritten(source)), re.compile(source, re.ASCII)
    draw = random.Random(2)
    texts = ["".join(draw.choices("abcx]-^_1 .\n\\/", k=draw.randrange(7))) for _ in range(20_000)]
    assert [bool(ours.fullmatch(text)) for text in texts] == [
        bool(python.fullmatch(text)) and not (source.endswith("$") and text.endswith("\n"))
        for text in texts
    ]


@pytest.mark.parametrize("source", SOURCES)
def test_in_json_they_match_what_json_writes(source: str) -> None:
    plain, within = (
        re.compile(rewritten(source, in_json=in_json).replace("\\u{10ffff}", "\U0010ffff"))
        for in_json in (False, True)
    )
    draw = random.Random(3)
    for _ in range(5000):
        text = "".join(draw.choices('abcx]-^_1 .\n\\/"', k=draw.randrange(7)))
        written = json.dumps(text)[1:-1]
        assert bool(within.fullmatch(written)) == bool(plain.fullmatch(text))


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("(a", "isn't closed"),
        ("a)", "')'"),
        ("(?=a)b", "'(?=a'"),
        (r"(a)\1", "'\\1'"),
        (r"\bx", "'\\b'"),
        ("[z-a]", "backwards"),
        ("[a", "too early"),
        ("*a", "'*a'"),
        ("a{2000}", "{2000}"),
        ("(" * 65 + ")" * 65, "deeper"),
        ("(?:" * 30 + "a" * 40 + "){900}" * 30 + "b" * 40_000, "exceeds"),
    ],
)
def test_expressions_that_are_refused(source: str, says: str) -> None:
    with pytest.raises(UnconstrainableError, match=re.escape(says)):
        rewritten(source)


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("", "'start' is missing"),
        ("start: a", "'a' is missing"),
        ('start: "(" start ")" | "x"', "'start' refers to itself"),
        ("start: a\na: b\nb: a", "refers to itself"),
        ("start: X\nX: /a/i", "flags 'i'"),
        ('start: "a"i', "upper and lower case"),
        ('start: "a"\n%ignore " "', "%ignore"),
        ("start: X\n%import common.X", "common.X"),
        ("start: X\n%import python.NAME", "python . NAME"),
        ('start: ("a"', "isn't closed"),
        ('start: "a" : "b"', "':'"),
        ('start{x}: "a"', "'{x}"),
        ('start: "a" ~ 2000', "2000"),
        ("| a", "can't begin with '|'"),
        (
            'start: a0 a0\na30: "x"\n'
            + "\n".join(f"a{at}: a{at + 1} a{at + 1}" for at in range(30)),
            "exceeds",
        ),
    ],
)
def test_grammars_that_are_refused(source: str, says: str) -> None:
    with pytest.raises(UnconstrainableError, match=re.escape(says)):
        lark_pattern(source)


RULES = [f"a{at}: a{at + 1} a{at + 1}" for at in range(40)]
LONG_GRAMMARS = {
    "empty rules, doubled": ["start: a0", *RULES, 'a40: ""'],
    "empty groups, doubled": ["start: a0", *RULES, 'a40: ("")'],
    "optional rules, doubled": ["start: a0", *RULES, 'a40: [""]? ""*'],
    "a rule many times": ["start: " + "a " * 7000, 'a: "' + "x" * 2000 + '"'],
    "long rules in long ones": [
        "start: a0",
        *[f"a{at}: {'b ' * 60} a{at + 1}" for at in range(60)],
        'a60: b\nb: "x"',
    ],
    "many rules of one": ["start: " + " ".join(f"a{at}" for at in range(1000)), 'b: "xyz"']
    + [f"a{at}: b" for at in range(1000)],
    "groups": ["start: " + "(" * 7000 + '"a"' + ")" * 7000],
    "alternatives": ["start: " + "|" * 14_000],
    "a text": ['start: "' + "".join(map(chr, range(0x100, 0x100 + 14_000))) + '"'],
    "imports": ["%import common.FLOAT"] * 700 + ["start: FLOAT"],
}
LONG_EXPRESSIONS = [
    "a" + "*" * 14_000,
    "a{1}" * 3000,
    "(" * 14_000,
    "()" * 7000,
    "(?:|)*" * 2000,
    "[" + r"\W" * 7000 + "]",
    r"\W" * 7000,
    "".join(f"[^{chr(300 + at)}]" for at in range(3500)),
    "".join(map(chr, range(0x100, 0x100 + 14_000))),
    "a{2" * 4000,
]


@pytest.mark.parametrize("lines", LONG_GRAMMARS.values(), ids=LONG_GRAMMARS)
def test_grammars_are_read_in_steps_per_byte(lines: list[str]) -> None:
    source = "\n".join(lines)

    def read() -> None:
        with contextlib.suppress(UnconstrainableError):
            rewritten(lark_pattern(source), in_json=True)

    steps(read, 1000 + 60 * len(source))


@pytest.mark.parametrize("source", LONG_EXPRESSIONS, ids=[each[:8] for each in LONG_EXPRESSIONS])
@pytest.mark.parametrize("in_json", [False, True])
def test_expressions_are_read_in_steps_per_byte(source: str, *, in_json: bool) -> None:
    def read() -> None:
        with contextlib.suppress(UnconstrainableError):
            rewritten(source, in_json=in_json)

    steps(read, 1000 + 60 * len(source))
