"""Every format reads what its models write; whole, and however it is divided."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream_server.formats.families import FORMATS
from millstream_server.formats.parser import Parser
from tests.support.answers import Part, divided, merged, parser, read

TOOLS: dict[str, Any] = {
    "f": {
        "type": "object",
        "properties": {
            "s": {"type": "string"},
            "n": {"type": "integer"},
            "x": {"$ref": "#/$defs/x"},
            "b": {"type": "boolean"},
            "o": {"type": "object"},
            "u": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        },
        "$defs": {"x": {"type": "number"}},
    },
    "g": {},
}


class Golden(NamedTuple):
    name: str
    answer: str
    parts: list[Part]


GOLDENS = [
    Golden(each["format"], each["answer"], [tuple(part) for part in each["parts"]])
    for each in yaml.safe_load(Path(__file__).with_name("goldens.yaml").read_text("utf-8"))
]

OFF = [
    Golden(each["format"], each["answer"], [tuple(part) for part in each["without_tools"]])
    for each in yaml.safe_load(Path(__file__).with_name("goldens.yaml").read_text("utf-8"))
    if "without_tools" in each
]


def in_pieces(text: str, size: int) -> list[str]:
    return [text[at : at + size] for at in range(0, len(text), size)]


@pytest.mark.parametrize(("name", "answer", "parts"), GOLDENS)
def test_an_answer_is_read(name: str, answer: str, parts: list[Part]) -> None:
    for size in (1, 2, 3, 5, 11, len(answer)):
        assert read(parser(FORMATS[name], TOOLS), in_pieces(answer, size)) == parts


def test_every_format_has_a_golden() -> None:
    assert {golden.name for golden in GOLDENS} == set(FORMATS)
    assert {golden.name for golden in OFF} == set(FORMATS)


@pytest.mark.parametrize(("name", "answer", "parts"), OFF)
def test_where_tools_are_off_a_calls_block_is_text(
    name: str, answer: str, parts: list[Part]
) -> None:
    for size in (1, 2, 3, 5, 11, len(answer)):
        parsing = parser(FORMATS[name], off=True)
        assert read(parsing, in_pieces(answer, size)) == parts
        assert not parsing.has_calls


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_where_tools_are_off_markers_by_their_ids_are_text_too(name: str) -> None:
    """As special tokens that the text lacks."""
    form = FORMATS[name]
    markers = (*form.call_open, *form.call_drop)
    hidden = dict(enumerate(markers))
    parsing = parser(form, hidden=hidden, off=True)
    events = [event for token_id in hidden for event in parsing.feed("", (token_id,))]
    written = "".join(part[1] for part in merged([*events, *parsing.finish()]))
    assert written == "".join(markers)


def test_what_a_message_has_begun_of_a_calls_marker_is_not_given_again() -> None:
    parsing = Parser(FORMATS["hermes"], None, begun="So.\n<tool")
    assert merged([*parsing.feed("_call>x"), *parsing.finish()]) == [("text", "_call>x")]


# ---- any text, divided anyhow: the same parts, and no exception

ANSWERS = st.sampled_from(GOLDENS).map(lambda golden: golden.answer)
MARKUP = st.sampled_from(sorted({word for each in GOLDENS for word in in_pieces(each.answer, 9)}))


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(sorted(FORMATS)),
    st.lists(ANSWERS | MARKUP | st.text(max_size=4), max_size=5),
    st.lists(st.integers(0, 400), max_size=8),
    st.integers(20, 400),
)
def test_any_division_gives_the_same(
    name: str, texts: list[str], cuts: list[int], end: int
) -> None:
    text = "".join(texts)[:end]
    whole = read(parser(FORMATS[name], TOOLS), [text])
    assert read(parser(FORMATS[name], TOOLS), divided(text, cuts)) == whole
    assert read(parser(FORMATS[name], TOOLS), list(text)) == whole
    off = read(parser(FORMATS[name], off=True), [text])
    assert read(parser(FORMATS[name], off=True), divided(text, cuts)) == off
    assert not [part for part in off if part[0] == "call"]
    for part in whole:
        if part[0] == "call" and part[-1] != "incomplete":
            assert isinstance(json.loads(part[3]), dict)


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_what_is_held_back_is_bounded(name: str) -> None:
    """Else each new token would cost more than the one before."""
    answers = [golden.answer for golden in GOLDENS if golden.name == name]
    begun = {answer[: answer.find("Oslo") + 2] for answer in answers} | {"", answers[0][:20]}
    for before in begun:
        for repeated in (" ", "\n", "<", "{", '"', "\\", "a", "1", "[", "<|", '{"'):
            reading = parser(FORMATS[name], TOOLS)
            reading.feed(before)
            for _ in range(1200):
                reading.feed(repeated)
            assert len(reading._held) <= 1100, (before, repeated)


# ---- what begins in the prompt, and what has tokens of its own


def test_a_prompt_may_have_begun_the_reasoning() -> None:
    qwen = FORMATS["qwen-xml"]
    parts = [("reasoning", "hm"), ("text", "Done.")]
    begun = parser(qwen, prompt="<|im_start|>assistant\n<think>\n")
    assert read(begun, ["hm\n", "</think>", "\n\nDone."]) == parts
    assert begun.tokens == [1, 2, 0]
    switched_off = parser(qwen, prompt="<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert read(switched_off, ["Done."]) == [("text", "Done.")]
    harmony = parser(FORMATS["harmony"], prompt="<|end|><|start|>assistant")
    assert read(harmony, [" to=functions.f<|channel|>commentary<|message|>", "{}"]) == [
        ("call", "0", "f", "{}")
    ]


def test_markers_that_the_text_does_not_show_are_seen_by_their_ids() -> None:
    kimi = FORMATS["kimi-k2"]
    texts = {
        90: "<|tool_calls_section_begin|>",
        91: "<|tool_call_begin|>",
        92: "<|tool_call_argument_begin|>",
        93: "<|tool_call_end|>",
        94: "<|im_end|>",
    }
    hidden = kimi.hidden(texts.items())
    assert hidden == {key: text for key, text in texts.items() if key != 94}
    reading = parser(kimi, hidden=hidden)
    tokens = [("Hi", 1), ("", 90), ("", 91), ("functions.f:3", 2), ("", 92), ("{}", 3), ("", 93),
              ("", 94)]  # fmt: skip
    events = [event for text, token in tokens for event in reading.feed(text, (token,))]
    assert merged([*events, *reading.finish()]) == [
        ("text", "Hi"),
        ("call", "functions.f:3", "f", "{}"),
    ]
    assert reading.tokens == [2, 0, 6]


def test_a_token_that_ends_calls_ends_them_in_the_middle_of_json_too() -> None:
    kimi = FORMATS["kimi-k2"]
    reading = parser(kimi, hidden={1: "<|tool_call_begin|>", 2: "<|tool_call_end|>"})
    events = reading.feed("<|tool_calls_section_begin|>", (0,)) + reading.feed("", (1,))
    events += reading.feed('functions.f:0<|tool_call_argument_begin|>{"s": "Os', (0,))
    events += reading.feed("", (2,)) + reading.feed("Done.", (0,)) + reading.finish()
    assert merged(events) == [
        ("call", "functions.f:0", "f", '{"s": "Os', "incomplete"),
        ("text", "Done."),
    ]
