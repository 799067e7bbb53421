"""A checkpoint's `response_template` is read as transformers reads it, as it comes."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.cli.serving import utils as serving
from transformers.utils.chat_parsing import parse_response

from millstream_server.formats.patterns import UnmappedTemplateError
from millstream_server.formats.response_template import format_of
from millstream_server.formats.tags import Thinking, Tool, Wanted, structural_tag
from tests.support.answers import Part, divided, parser, read
from tests.support.walks import Tag
from tests.support.writing import WRITERS, Writer


class Case(NamedTuple):
    name: str
    template: dict[str, Any]
    writer: Writer


def _of_transformers(model_type: str) -> dict[str, Any]:
    """Return the template that transformers' own server has for a model without one."""
    found: dict[str, Any] = next(
        template
        for types, template in serving._RESPONSE_TEMPLATE_FALLBACKS.items()
        if model_type in types
    )
    return found


_CHATML = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
CASES = [
    *[
        Case(each["name"], each["template"], Writer(**each["writer"]))
        for each in yaml.safe_load(
            Path(__file__).with_name("response_templates.yaml").read_text("utf-8")
        )
    ],
    Case("qwen3", _of_transformers("qwen3"), replace(WRITERS["hermes"], prompt=_CHATML)),
    Case("qwen3.5", _of_transformers("qwen3_5"), replace(WRITERS["qwen-xml"], prompt=_CHATML)),
    Case("gemma4", _of_transformers("gemma4"), replace(WRITERS["gemma4"], prompt="<|turn>model\n")),
]

PROPERTIES = {
    "s": {"type": "string"},
    "n": {"type": "integer"},
    "x": {"type": "number"},
    "b": {"type": "boolean"},
    "o": {"type": "object"},
    "a": {"type": "array", "items": {"type": "string"}},
}
SCHEMA = {"type": "object", "properties": PROPERTIES}
TOOLS = {"weather": SCHEMA, "g": {"type": "object", "properties": {}}}


def ours(case: Case, pieces: list[str]) -> list[Part]:
    return read(
        parser(format_of(json.dumps(case.template)), TOOLS, prompt=case.writer.prompt), pieces
    )


def as_message(parts: list[Part]) -> dict[str, Any]:
    """Return what transformers makes of the same answer."""
    message: dict[str, Any] = {
        "thinking": "".join(part[1] for part in parts if part[0] == "reasoning"),
        "content": "".join(part[1] for part in parts if part[0] == "text"),
        "tool_calls": [(part[2], json.loads(part[3])) for part in parts if part[0] == "call"],
    }
    assert all(len(part) < 5 for part in parts), "complete"
    return {key: value for key, value in message.items() if value}


def theirs(case: Case, text: str) -> dict[str, Any]:
    tools = [
        {"type": "function", "function": {"name": n, "parameters": s}} for n, s in TOOLS.items()
    ]
    message = parse_response(text, case.template, prefix=case.writer.prompt, tools=tools)
    thinking = message.get("thinking") or message.get("reasoning_content")
    calls = [
        (call["function"]["name"], call["function"]["arguments"])
        for call in message.get("tool_calls", [])
    ]
    found = {"thinking": thinking, "content": message.get("content"), "tool_calls": calls}
    return {key: value for key, value in found.items() if value}


TEXTS = st.text("abc \n.,é\"'\\", min_size=1, max_size=20).map(str.strip)
LEAVES = {
    "s": TEXTS.filter(bool),
    "n": st.integers(),
    "x": st.floats(allow_nan=False, allow_infinity=False).map(lambda each: each + 0.5),
    "b": st.booleans(),
    "o": st.dictionaries(st.sampled_from(("k", "l")), TEXTS | st.integers(), max_size=2),
    "a": st.lists(TEXTS, max_size=3),
}
ARGUMENTS = st.fixed_dictionaries({}, optional=LEAVES)
CALLS = st.lists(st.tuples(st.just("weather"), ARGUMENTS) | st.just(("g", {})), max_size=3)


@settings(max_examples=250, deadline=None)
@given(st.sampled_from(CASES), TEXTS, TEXTS, CALLS, st.lists(st.integers(0, 400), max_size=6))
def test_an_answer_is_read_as_transformers_reads_it(
    case: Case,
    thinking: str,
    text: str,
    calls: list[tuple[str, dict[str, Any]]],
    cuts: list[int],
) -> None:
    answer = case.writer.write(thinking, text, calls)
    parts = ours(case, divided(answer, cuts))
    assert as_message(parts) == theirs(case, answer)
    assert [(part[2], json.loads(part[3])) for part in parts if part[0] == "call"] == calls


def test_an_answer_may_begin_with_reasoning_that_nothing_has_opened() -> None:
    case = next(each for each in CASES if each.name == "response-tags")
    form, prompt = format_of(json.dumps(case.template)), case.writer.prompt
    assert Thinking.behind(form, prompt) is Thinking.BEGUN
    assert Thinking.behind(form, f"{prompt}<think>\n") is Thinking.BEGUN
    assert Thinking.behind(form, f"{prompt}</think>\n") is Thinking.NONE
    reading = parser(form, prompt=f"{prompt}</think>\n")
    assert read(reading, ["Hi"]) == [("text", "Hi")]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_its_tag_admits_is_read(case: Case) -> None:
    form = format_of(json.dumps(case.template))
    tool = Tool("weather", SCHEMA, strict=True)
    wanted = Wanted(
        tools=(tool,), must_call=True, thinking=Thinking.behind(form, case.writer.prompt)
    )
    source = structural_tag(form, wanted)
    assert source is not None
    rng = random.Random(7)
    tag = Tag(source)
    for text in filter(None, (tag.walk(rng) for _ in range(4))):
        calls = [part for part in ours(case, [text]) if part[0] == "call"]
        assert calls, text
        for call in calls:
            assert len(call) == 4, text
            jsonschema.validate(json.loads(call[3]), SCHEMA)


_CALL = '<tool_call>\n{"name": "g", "arguments": {"k": 1}}\n</tool_call>'
_VALUE = "<tool_call>\n<function=g>\n<parameter=k>\n%s\n</parameter>\n</function>\n</tool_call>"


@pytest.mark.parametrize(
    ("name", "answer", "parts", "message"),
    [
        pytest.param(
            "qwen3",
            f"One.{_CALL}Two.",
            [("text", "One."), ("call", "0", "g", '{"k": 1}'), ("text", "Two.")],
            {"content": "Two.", "tool_calls": [("g", {"k": 1})]},
            id="text in several places is all kept",
        ),
        pytest.param(
            "qwen3",
            f"<think>a{_CALL}b</think>",
            [("reasoning", "a"), ("call", "0", "g", '{"k": 1}'), ("reasoning", "b")],
            {"thinking": f"a{_CALL}b"},
            id="a call inside of reasoning is a call",
        ),
        pytest.param(
            "qwen3",
            _CALL.replace("1", '"</tool_call>"'),
            [("call", "0", "g", '{"k": "</tool_call>"}')],
            None,
            id="a marker in a JSON string is text",
        ),
        pytest.param(
            "qwen3", _CALL[:42], [("call", "0", "g", '{"k', "incomplete")], None, id="a cut call"
        ),
        pytest.param(
            "qwen3", "  Hi  ", [("text", "  Hi  ")], {"content": "Hi"}, id="spaces are text"
        ),
        pytest.param(
            "actions",
            "Hi<|START_RESPONSE|>!<|END_RESPONSE|>",
            [("text", "Hi!")],
            {"content": "!"},
            id="text without its markers is text",
        ),
        pytest.param(
            "qwen3.5",
            f"{_VALUE % '    x = 1'}",
            [("call", "0", "g", '{"k": "    x = 1"}')],
            {"tool_calls": [("g", {"k": "x = 1"})]},
            id="a value keeps its indentation",
        ),
        pytest.param(
            "qwen3.5",
            f"{_VALUE % '3'}",
            [("call", "0", "g", '{"k": 3}')],
            {"tool_calls": [("g", {"k": "3"})]},
            id="what has no schema and reads as a number is one",
        ),
    ],
)
def test_what_is_read_otherwise_than_transformers_reads_it(
    name: str, answer: str, parts: list[Part], message: dict[str, Any] | None
) -> None:
    """Each has its row in docs/formats.md."""
    case = next(each for each in CASES if each.name == name)
    assert ours(case, [answer]) == parts
    if message is None:
        with pytest.raises(ValueError, match="could not parse"):
            theirs(case, answer)
    else:
        assert theirs(case, answer) == message


_CALLS = {
    "open": "<c>",
    "close": "</c>",
    "content": "json",
    "transform": {"function": "{content}"},
}
_NAMED = {"function": {"name": "{n}", "arguments": "{content}"}}
_TAGGED = {**_CALLS, "open_pattern": r"<c>(?P<n>\w+)>", "transform": _NAMED}
_XML = {**_TAGGED, "content": "xml-inline"}
del _TAGGED["open"], _XML["open"]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"title": {"open": "<t>", "close": "</t>"}}, "the field 'title'"),
        ({"thinking": {"open": "<t>"}}, "the field 'thinking' has no text at its beginning or end"),
        ({"content": {"content": "int"}}, "the field 'content' isn't plain text"),
        ({"content": {"open_pattern": r"<\d+>"}}, "a marker that isn't a text"),
        ({"content": {"open_pattern": "<a>(?=b)"}}, r"'(?=b' in a pattern"),
        ({"tool_calls": {**_CALLS, "content": "kv-lines"}}, "the 'transform' of the field"),
        ({"tool_calls": {**_TAGGED, "content": "kv-lines"}}, "calls as 'kv-lines'"),
        ({"tool_calls": {**_TAGGED, "open_pattern": r"to=(?P<n>\w+)>"}}, "calls without a marker"),
        (
            {
                "tool_calls": {
                    **_CALLS,
                    "transform": {"function": {"name": "x", "arguments": "{a}"}},
                }
            },
            "the 'transform' of the field 'tool_calls'",
        ),
        (
            {"tool_calls": {**_XML, "content_args": {"merge_duplicates": True}}},
            "'merge_duplicates': a key that comes twice is a list",
        ),
        (
            {
                "tool_calls": {
                    **_XML,
                    "content_args": {"tag_pattern": r"(?P<key>\w+)=(?P<value>.*)"},
                }
            },
            "a 'tag_pattern' whose key has no markers",
        ),
        ({"tool_calls": {**_TAGGED, "content_args": {"unquoted_keys": True}}}, "JSON with such"),
        ("fields", "it is no template of version 1"),
    ],
)
def test_what_the_table_cannot_say_is_named(fields: Any, says: str) -> None:
    with pytest.raises(UnmappedTemplateError) as raised:
        format_of(json.dumps({"start_anchor": "<a>", "fields": fields}))
    assert says in str(raised.value)
