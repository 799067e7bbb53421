"""What a format's structural tag admits, its parser reads; and makers' own calls are admitted."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from dataclasses import replace
from typing import Any

import jsonschema
import pytest
import xgrammar

from millstream_server.formats.families import FORMATS
from millstream_server.formats.tag_parts import ANSWER_SPACE, json_value
from millstream_server.formats.tags import (
    Thinking,
    Tool,
    UnconstrainableError,
    Wanted,
    structural_tag,
)
from millstream_server.generation.grammar_shapes import shape_problem
from millstream_server.generation.sampling import Constraint, ConstraintKind
from tests.support.answers import Part, parser, read
from tests.support.native_calls import ARGUMENTS, NATIVE, Native
from tests.support.walks import Tag
from tests.support.writing import WRITERS

WIDE: dict[str, Any] = {
    "type": "object",
    "properties": {
        "s": {"type": "string"},
        "n": {"type": "integer", "minimum": 3, "maximum": 400},
        "x": {"$ref": "#/$defs/x"},
        "b": {"type": "boolean"},
        "o": {
            "type": "object",
            "properties": {"k": {"type": "string", "maxLength": 4}, "i": {"$ref": "#/$defs/x"}},
            "required": ["k"],
            "additionalProperties": False,
        },
        "a": {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 3},
        "u": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "e": {"enum": ["x", "y z"]},
        "v": {"enum": ["x", 1, None, "null"]},
        "m": {"type": ["string", "array"]},
        "l": {"type": "string", "minLength": 2, "maxLength": 5},
        "d": {"type": "object", "additionalProperties": {"type": "integer"}},
    },
    "required": ["s", "n", "o"],
    "additionalProperties": False,
    "$defs": {"x": {"type": "number"}},
}
TOOLS = (
    Tool("f", WIDE, strict=True),
    Tool("g", {"type": "object", "properties": {}, "additionalProperties": False}, strict=True),
    Tool("h", {"type": "object", "additionalProperties": {"type": "boolean"}}, strict=True),
    Tool("free", {}),
)
SCHEMAS = {tool.name: dict(tool.schema) for tool in TOOLS}
CONSTRAINED = sorted(name for name, form in FORMATS.items() if form.written is not None)


def test_only_formats_without_calls_have_no_grammar() -> None:
    assert set(FORMATS) - set(CONSTRAINED) == {"think"}


WITHOUT = {"minimax-m3": ("m", "v", "l")}
"""Properties that a format can't keep: unions of text and more, a least length."""


def _tools(name: str) -> tuple[Tool, ...]:
    left_out = WITHOUT.get(name, ())
    kept = {key: part for key, part in WIDE["properties"].items() if key not in left_out}
    return (replace(TOOLS[0], schema={**WIDE, "properties": kept}), *TOOLS[1:])


def _tag(name: str, wanted: Wanted) -> Tag:
    source = structural_tag(FORMATS[name], wanted)
    assert source is not None
    assert shape_problem(Constraint(ConstraintKind.STRUCTURAL_TAG, source)) is None
    return Tag(source)


def _read(name: str, wanted: Wanted, text: str) -> list[Part]:
    spans = FORMATS[name].reasoning
    prompt = spans[0].open if spans and wanted.thinking is Thinking.BEGUN else ""
    return read(parser(FORMATS[name], SCHEMAS, prompt=prompt), [text])


def _calls(parts: list[Part]) -> list[Part]:
    calls = [part for part in parts if part[0] == "call"]
    for call in calls:
        assert len(call) == 4, "complete"
        jsonschema.validate(json.loads(call[3]), SCHEMAS[call[2]])
    return calls


@pytest.mark.parametrize("name", CONSTRAINED)
def test_what_a_tag_admits_is_read(name: str) -> None:
    wanted = Wanted(tools=_tools(name), thinking=Thinking.BEGUN, must_call=True)
    rng = random.Random(3)
    tag, walks = _tag(name, wanted), 0
    while walks < 4:
        if (text := tag.walk(rng)) is None:
            continue
        walks += 1
        parts = _read(name, wanted, text)
        assert _calls(parts), text
        kinds = {part[0] for part in parts}
        if not (form := FORMATS[name].written) or not form.answer_first:
            assert "text" not in kinds, text
        if "reasoning" in kinds:
            assert parts[0][0] == "reasoning", text


@pytest.mark.parametrize("name", CONSTRAINED)
def test_calls_that_may_be_made_are_read_and_others_not_written(name: str) -> None:
    wanted = Wanted(tools=_tools(name), thinking=Thinking.MAY)
    rng = random.Random(5)
    tag = _tag(name, wanted)
    for text in filter(None, (tag.walk(rng) for _ in range(4))):
        _calls(_read(name, wanted, text))
    single = replace(wanted, must_call=True, only="g")
    text = next(filter(None, (_tag(name, single).walk(rng) for _ in range(20))))
    assert [call[2] for call in _calls(_read(name, single, text))] == ["g"]


# ---- what models write, in their makers' form; and xgrammar's own tags


NARROW = {
    "type": "object",
    "properties": {"s": {"type": "string"}, "n": {"type": "integer"}},
    "required": ["s", "n"],
}
MUST = Wanted(tools=(Tool("f", NARROW, strict=True),), must_call=True)


def _builtin(name: str) -> Tag:
    function = {"type": "function", "function": {"name": "f", "parameters": NARROW}}
    made = xgrammar.get_model_structural_tag(name, [function], "required", "disabled")
    return Tag(made.model_dump_json())


@pytest.mark.parametrize("native", NATIVE, ids=lambda each: f"{each.name}-{NATIVE.index(each)}")
def test_a_call_as_models_write_it_is_admitted(native: Native) -> None:
    tag = _tag(native.name, MUST)
    assert tag.admits(native.call)
    prompt = WRITERS[native.name].prompt
    reading = parser(FORMATS[native.name], {"f": NARROW}, prompt=prompt)
    ((_, _, called, arguments),) = read(reading, [native.call])
    assert (called, json.loads(arguments)) == ("f", {"s": "Oslo, 3", "n": 3})
    assert not tag.admits(native.call.replace("Oslo, 3", "x").replace("3", "three")), "no integer"
    assert not tag.admits("Oslo" + native.call.removeprefix("<|close|>response<|sep|>"))
    if native.builtin:
        # This one closes reasoning that the prompt has opened.
        lead = "\n</think>\n\n\n\n" if native.builtin == "minimax" else ""
        assert _builtin(native.builtin).admits(lead + native.call)


def test_every_grammar_has_a_native_call() -> None:
    assert {native.name for native in NATIVE} == set(CONSTRAINED)


@pytest.mark.parametrize(
    ("name", "builtin", "old", "new"),
    [
        ("deepseek-v4", "deepseek_v4", 'name="n" string="false"', 'name="n" string="true"'),
        ("deepseek-v3.2", "deepseek_v3_2", 'name="s" string="true"', 'name="s" string="false"'),
        ("qwen-xml", "qwen_3_coder", "Oslo", "\n</function>\n"),
    ],
)
def test_xgrammars_own_tag_admits_what_is_misread_and_ours_not(
    name: str, builtin: str, old: str, new: str
) -> None:
    native = next(each for each in NATIVE if each.name == name)
    text = native.call.replace(old, new)
    assert _builtin(builtin).admits(text)
    assert not _tag(name, MUST).admits(text)


# ---- answers, reasoning, and what is refused


def test_an_answers_schema_holds_behind_reasoning_and_calls_stand_for_it() -> None:
    wanted = replace(
        MUST, must_call=False, answer=json_value(NARROW, ANSWER_SPACE), thinking=Thinking.BEGUN
    )
    tag = _tag("hermes", wanted)
    call = NATIVE[0].call
    for answer in (ARGUMENTS, '{\n  "s": "",\n  "n": 1\n}', call):
        assert tag.admits(f"hm\n</think>\n\n{answer}")
    for bad in (ARGUMENTS, "</think>Hi", "</think>{}", f"{call}</think>{ARGUMENTS}"):
        assert not tag.admits(bad)
    optional = _tag("hermes", replace(wanted, thinking=Thinking.MAY))
    assert optional.admits(ARGUMENTS)
    assert optional.admits(f"<think>hm</think>{ARGUMENTS}")
    assert _tag("think", Wanted(answer=json_value(NARROW, ANSWER_SPACE))).admits(ARGUMENTS)
    harmony = _tag("harmony", replace(wanted, thinking=Thinking.MAY))
    assert harmony.admits(
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>"
        + ARGUMENTS
    )


def test_text_and_calls_alternate_unless_only_one_call_may_be_made() -> None:
    call = NATIVE[0].call
    many = _tag("hermes", replace(MUST, must_call=False))
    assert many.admits(f"First{call}then\n{call}.")
    assert many.admits("Nothing to call.")
    single = _tag("hermes", replace(MUST, must_call=False, parallel=False))
    assert single.admits(f"First{call}")
    assert not single.admits(f"{call}{call}")


def test_reasoning_ends_behind_so_many_tokens_and_what_follows_is_free() -> None:
    wanted = Wanted(tools=(Tool("f", NARROW),), thinking=Thinking.BEGUN, reasoning_tokens=3)
    tag, call = _tag("hermes", wanted), NATIVE[0].call
    for text in (
        "abc</think>",
        "</think>",
        f"a</think>\nSo {call}{call}",
        "abc</think><tool_call>[",
    ):
        assert tag.draws(text), text
    for text in ("abcd</think>", "abc", "ab</think>c<think>d</think>"):
        assert not tag.draws(text), text
    none = _tag("hermes", replace(wanted, thinking=Thinking.MAY, reasoning_tokens=0))
    assert none.draws("<think></think>Hi")
    assert none.draws("Hi")
    assert not none.draws("<think>a</think>Hi")
    harmony = _tag("harmony", replace(wanted, thinking=Thinking.MAY))
    native = next(each.call for each in NATIVE if each.name == "harmony")
    assert harmony.draws(f"<|channel|>analysis<|message|>abc<|end|><|start|>assistant{native}")
    must = _tag("hermes", replace(wanted, must_call=True))
    assert must.draws(f"abc</think>{call}")
    assert not must.draws(f"abcd</think>{call}")


@pytest.mark.parametrize(
    ("name", "prompt", "thinking"),
    [
        ("hermes", "<|im_start|>assistant\n", Thinking.MAY),
        ("hermes", "<|im_start|>assistant\n<think>\n", Thinking.BEGUN),
        ("hermes", "<|im_start|>assistant\n<think>\n\n</think>\n\n", Thinking.NONE),
        ("llama-json", "<|eot_id|>", Thinking.NONE),
        ("harmony", "<|start|>assistant", Thinking.MAY),
        ("kimi-k3", "<|open|>response<|sep|>", Thinking.NONE),
    ],
)
def test_the_prompt_says_where_an_answer_begins(name: str, prompt: str, thinking: Thinking) -> None:
    assert Thinking.behind(FORMATS[name], prompt) is thinking


def test_a_tag_is_made_only_where_one_is_needed() -> None:
    lax = Wanted(tools=(Tool("f", NARROW),))
    form = FORMATS["hermes"]
    assert structural_tag(form, Wanted()) is structural_tag(form, lax) is None
    for bound in (
        replace(lax, parallel=False),
        replace(lax, must_call=True),
        replace(lax, only="f"),
        replace(lax, answer=json_value({})),
    ):
        assert structural_tag(form, bound) is not None


TREE = {"properties": {"left": {"$ref": "#"}, "right": {"$ref": "#"}}}


@pytest.mark.parametrize(
    ("name", "schema", "says"),
    [
        ("think", {}, "the format think has no grammar of calls"),
        ("hermes", {"properties": {"a": {"multipleOf": 2}}}, "f: no grammar keeps 'multipleOf'"),
        ("qwen-xml", {"anyOf": [{"required": ["a"]}]}, "f: 'anyOf' isn't kept in this format"),
        ("glm-kv", {"properties": {"a>": {}}}, "f: the property 'a>' can't be written"),
        ("qwen-xml", TREE, "f: a \\$ref of it leads elsewhere than to \\$defs"),
        ("gemma4", TREE, "f: its schema is too large, or without an end, for this format"),
        ("pythonic", {"properties": {"a-b": {}}}, "f: the property 'a-b' is no name in Python"),
        ("pythonic", {"properties": {"a": {"pattern": "b"}}}, "f: 'pattern' isn't kept"),
    ],
)
def test_what_no_grammar_keeps_is_refused_by_name_for_strict_tools(
    name: str, schema: dict[str, Any], says: str
) -> None:
    schema = {"type": "object", **schema}
    wanted = Wanted(tools=(Tool("f", schema, strict=True),), must_call=True)
    with pytest.raises(UnconstrainableError, match=says):
        structural_tag(FORMATS[name], wanted)
    if name != "think":
        lax = replace(wanted, tools=(Tool("f", schema),))
        assert structural_tag(FORMATS[name], lax) is not None


def test_a_tool_that_is_not_there_cannot_be_the_only_one() -> None:
    with pytest.raises(UnconstrainableError, match="there is no tool 'x' to be called"):
        structural_tag(FORMATS["hermes"], replace(MUST, only="x"))


def test_tags_are_made_without_torch_and_xgrammar() -> None:
    code = (
        "import sys; sys.modules.update(torch=None, xgrammar=None)\n"
        "from millstream_server.formats import families, tags\n"
        "wanted = tags.Wanted(tools=(tags.Tool('f', {}),), must_call=True)\n"
        "assert tags.structural_tag(families.FORMATS['hermes'], wanted)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
