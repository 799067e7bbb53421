"""What a model writes comes back: order, names, and arguments to the byte, from the first token."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream_server.formats.events import Arguments
from millstream_server.formats.families import FORMATS
from tests.support.answers import Part, divided, parser, read
from tests.support.writing import WRITERS

TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array",
         dict: "object", type(None): "null"}  # fmt: skip
AS_JSON = sorted(name for name, writer in WRITERS.items() if not writer.argument)
IN_ITS_OWN = sorted(name for name, writer in WRITERS.items() if writer.argument)
WITHOUT_NESTED_TEXT = {"minimax-m3"}
"""Formats whose nested values have no types of their own."""


def test_every_format_with_calls_has_a_writer() -> None:
    assert set(WRITERS) == {name for name, form in FORMATS.items() if form.call is not None}


def tools_for(*calls: dict[str, Any]) -> dict[str, Any]:
    return {
        f"f{index}": {"properties": {key: {"type": TYPES[type(v)]} for key, v in call.items()}}
        for index, call in enumerate(calls)
    }


def as_read(name: str, answer: str, calls: list[dict[str, Any]], cuts: list[int]) -> list[Part]:
    reading = parser(FORMATS[name], tools_for(*calls), prompt=WRITERS[name].prompt)
    return read(reading, divided(answer, cuts))


TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\r"), max_size=30)
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | TEXTS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text('abc<>"é\\', max_size=6), inner, max_size=4)
    ),
    max_leaves=20,
)  # fmt: skip
OBJECTS = st.dictionaries(st.text("abcdef_", min_size=1, max_size=6), VALUES, max_size=5)
FLAT = st.dictionaries(
    st.text("abcdef_", min_size=1, max_size=6),
    st.none() | st.booleans() | st.integers() | TEXTS,
    max_size=5,
)
PROSE = st.text("ab c.,é'", max_size=12).map(str.strip)
CUTS = st.lists(st.integers(0, 600), max_size=8)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted(WRITERS)), PROSE, PROSE, st.data(), CUTS)
def test_an_answer_comes_back(
    name: str, thinking: str, text: str, data: st.DataObject, cuts: list[int]
) -> None:
    writer = WRITERS[name]
    values = FLAT if name in WITHOUT_NESTED_TEXT else OBJECTS
    calls = data.draw(st.lists(values, max_size=3))
    answer = writer.write(thinking, text, [(f"f{at}", call) for at, call in enumerate(calls)])
    parts = as_read(name, answer, calls, cuts)
    expected: list[tuple[Any, ...]] = []
    if thinking and writer.thinking:
        expected.append(("reasoning", thinking))
    if text:
        expected.append(("text", text))
    expected += [("call", f"f{index}", call) for index, call in enumerate(calls)]
    assert [
        (part[0], part[2], json.loads(part[3])) if part[0] == "call" else part for part in parts
    ] == expected
    assert all(len(part) < 5 for part in parts), "complete"


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(AS_JSON), OBJECTS, st.booleans(), CUTS)
def test_json_arguments_come_back_byte_for_byte(
    name: str, value: dict[str, Any], ascii_only: Any, cuts: list[int]
) -> None:
    answer = WRITERS[name].write("", "", [("f0", value)], ascii_only=ascii_only)
    (call,) = as_read(name, answer, [value], cuts)
    assert call[2:] == ("f0", json.dumps(value, ensure_ascii=ascii_only))


def large(name: str) -> dict[str, Any]:
    """Return arguments of 100 kB with everything in it."""
    chance = random.Random(name)
    chars = "abc \n\t\"'\\{}[]<>/|é😀,:=()0123"
    nested = [{"k": chance.random() * 10**i, "s": "<|x>\n" * i} for i in range(-20, 200)]
    texts = {"code": "".join(chance.choices(chars, k=90_000))}
    return texts if name in WITHOUT_NESTED_TEXT else {**texts, "list": nested}


@pytest.mark.parametrize("name", sorted(WRITERS))
def test_100_kb_of_arguments_come_back(name: str) -> None:
    value = large(name)
    answer = WRITERS[name].write("", "", [("f0", value)])
    (call,) = as_read(name, answer, [value], list(range(0, len(answer), 7)))
    assert len(call) == 4, "complete"
    if name in AS_JSON:
        assert call[3] == json.dumps(value, ensure_ascii=False)
    assert json.loads(call[3]) == value


@pytest.mark.parametrize(
    ("value", "written", "first"),
    [("Oslo is a town", "Oslo", '"O'), (4711, "4711", "4"), (["Oslo"], "Oslo", '["O')],
    ids=["string", "number", "list"],
)
@pytest.mark.parametrize("name", sorted(WRITERS))
def test_the_first_piece_of_an_argument_comes_with_its_first_token(
    name: str, value: Any, written: str, first: str
) -> None:
    answer = WRITERS[name].write("", "", [("f0", {"s": value})])
    schema = {"type": TYPES[type(value)], "items": {"type": "string"}}
    tools = {"f0": {"properties": {"s": schema}}}
    reading = parser(FORMATS[name], tools, prompt=WRITERS[name].prompt)
    tokens = answer[: answer.index(written) + 1]  # of one character each
    events = [event for token in tokens for event in reading.feed(token)]
    came = "".join(event.json for event in events if isinstance(event, Arguments))
    assert came.endswith(first), came
