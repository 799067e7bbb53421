"""Tools of the Responses API: names that a model can write, and the text of custom tools."""

from __future__ import annotations

import json
import random
import re

import pytest

from millstream_server.processor.http.responses import tools
from millstream_server.processor.http.responses.tools import CustomInput, told_name

_TEXT = 'a "b"\\n\\\n\té\U0001f600\U0001f600 }'


def read(arguments: str, cuts: list[int]) -> str:
    """Read arguments that are cut at some places."""
    given = CustomInput()
    ends = [*cuts, len(arguments)]
    found = [given.push(arguments[start:end]) for start, end in zip([0, *cuts], ends, strict=True)]
    return "".join(found) + given.finish()


@pytest.mark.parametrize("ascii_only", [True, False])
def test_the_text_is_the_same_however_it_is_cut(*, ascii_only: bool) -> None:
    arguments = ' { "input" : ' + json.dumps(_TEXT, ensure_ascii=ascii_only) + "}\n"
    draw = random.Random(1)
    for _ in range(300):
        cuts = sorted(draw.sample(range(len(arguments)), draw.randrange(12)))
        assert read(arguments, cuts) == _TEXT


def test_a_piece_is_returned_when_it_comes() -> None:
    given = CustomInput()
    pieces = ['{"input": "', "ab", "c\\", "n", '"}']
    assert [given.push(piece) for piece in pieces] == ["", "ab", "c", "\n", ""]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"patch": "a\\nb"}', "a\nb"),
        ('{"a": "1", "input": "b"}', '{"a": "1", "input": "b"}'),
        ('{"input": 3}', '{"input": 3}'),
        ("{}", "{}"),
        ('{"input": "cut', "cut"),
        (" " * 600 + '{"input": "late"}', "late"),
        ('{"input": "a", "more": "b"}', "a"),
        ('{"input": "half \\ud83d, a pair"}', "half �, a pair"),
    ],
)
def test_other_arguments_than_the_one_text(arguments: str, text: str) -> None:
    assert read(arguments, [1]) == text


def test_blanks_before_the_text_are_read_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    read_chars = 0

    class Counting:
        def match(self, text: str) -> None:
            nonlocal read_chars
            read_chars += len(text)

    monkeypatch.setattr(tools, "_BEGIN", Counting())
    given = CustomInput()
    for _ in range(10_000):
        given.push(" ")
    assert read_chars < 100_000


@pytest.mark.parametrize(
    "before", ['{"a": 1, "b": "', '{"input": "', '{"input": "" , "b": "', "  "]
)
def test_what_is_held_is_bounded(before: str) -> None:
    """Whatever follows: what comes isn't read again with each piece."""
    given, end = CustomInput(), "\\q" if "input" in before else " "
    given.push(before)
    sizes = []
    for _ in range(100):
        given.push(end * 100)
        sizes.append(len(given._held))
    assert max(sizes) <= 512


def test_the_text_may_come_at_once_or_begin_late() -> None:
    long = "x" * 5000
    assert read(json.dumps({"input": long}), []) == long
    assert read('{"input": ' + " " * 600 + json.dumps(long) + "}", [20, 300, 700]) == long


def test_a_name_has_its_namespace_and_is_short_enough() -> None:
    assert told_name("read", "") == told_name("read", "functions") == "read"
    assert (
        told_name("read", "mcp__files__") == told_name("read", "mcp__files") == "mcp__files__read"
    )
    long, other = (told_name("read" * 10 + end, "files" * 10) for end in "ab")
    assert long != other
    assert all(re.fullmatch("[A-Za-z0-9_-]{64}", name) for name in (long, other))
