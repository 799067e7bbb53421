"""What a format's structural tag admits, its parser reads; and makers' own calls are admitted."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from dataclasses import replace
from typing import Any, NamedTuple

import jsonschema
import pytest
import xgrammar

from millstream_server.formats.families import FORMATS
from millstream_server.formats.tags import (
    Calls,
    Thinking,
    Tool,
    UnconstrainableError,
    Wanted,
    structural_tag,
)
from millstream_server.generation.grammar_shapes import shape_problem
from millstream_server.generation.sampling import Constraint, ConstraintKind
from tests.support.answers import Part, parser, read
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
    wanted = Wanted(tools=_tools(name), thinking=Thinking.BEGUN, calls=Calls.REQUIRED)
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
    single = replace(wanted, calls=Calls.REQUIRED, only="g")
    text = next(filter(None, (_tag(name, single).walk(rng) for _ in range(20))))
    assert [call[2] for call in _calls(_read(name, single, text))] == ["g"]
    never = replace(wanted, calls=Calls.NONE)
    tag = _tag(name, never)
    for text in filter(None, (tag.walk(rng) for _ in range(4))):
        assert not _calls(_read(name, never, text)), text


# ---- what models write, in their makers' form; and xgrammar's own tags


class Native(NamedTuple):
    name: str
    call: str
    builtin: str = ""
    """xgrammar's name of such a format."""


_DSML = """\n\n<｜DSML｜{0}>\n<｜DSML｜{1}invoke name="f">
<｜DSML｜{1}parameter name="s" string="true">Oslo, 3</｜DSML｜{1}parameter>
<｜DSML｜{1}parameter name="n" string="false">3</｜DSML｜{1}parameter>
</｜DSML｜{1}invoke>\n</｜DSML｜{0}>"""
_ARGUMENTS = '{"s": "Oslo, 3", "n": 3}'
_XML = (
    "<function=f>\n<parameter=s>\nOslo, 3\n</parameter>\n"
    "<parameter=n>\n3\n</parameter>\n</function>"
)
_KV = (
    "<arg_key>s</arg_key>{0}<arg_value>Oslo, 3</arg_value>{0}"
    "<arg_key>n</arg_key>{0}<arg_value>3</arg_value>"
)
NATIVE = (
    Native(
        "hermes", f'<tool_call>\n{{"name": "f", "arguments": {_ARGUMENTS}}}\n</tool_call>', "qwen_3"
    ),
    Native("qwen-xml", f"<tool_call>\n{_XML}\n</tool_call>", "qwen_3_coder"),
    Native("seed", f"<seed:tool_call>\n{_XML}\n</seed:tool_call>"),
    Native("glm-kv", f"<tool_call>f{_KV.format('')}</tool_call>", "glm_4_7"),
    Native("glm-kv", "<tool_call>f\n" + _KV.format("\n") + "\n</tool_call>"),
    Native(
        "hunyuan",
        "<tool_calls>\n<tool_call>f<tool_sep>\n"
        + _KV.format("\n")
        + "\n</tool_call>\n</tool_calls>",
    ),
    Native(
        "deepseek-v3",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
        f"{_ARGUMENTS}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "deepseek_r1",
    ),
    Native(
        "deepseek-v3.1",
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{_ARGUMENTS}"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "deepseek_v3_1",
    ),
    Native("deepseek-v3.2", _DSML.format("function_calls", ""), "deepseek_v3_2"),
    Native("deepseek-v4", _DSML.format("tool_calls", ""), "deepseek_v4"),
    Native("deepseek-v4.1", _DSML.format(" calls", " "), "deepseek_v4_1"),
    Native(
        "kimi-k2",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
        f"{_ARGUMENTS}<|tool_call_end|><|tool_calls_section_end|>",
        "kimi",
    ),
    Native(
        "kimi-k3",
        '<|close|>response<|sep|><|open|>tools<|sep|><|open|>call tool="f" index="0"<|sep|>'
        '<|open|>argument key="s" type="string"<|sep|>Oslo, 3<|close|>argument<|sep|>'
        '<|open|>argument key="n" type="number"<|sep|>3<|close|>argument<|sep|>'
        "<|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|>",
        "kimi_k3",
    ),
    Native(
        "minimax-m2",
        '\n<minimax:tool_call>\n<invoke name="f">\n<parameter name="s">Oslo, 3</parameter>\n'
        '<parameter name="n">3</parameter>\n</invoke>\n</minimax:tool_call>',
        "minimax",
    ),
    Native(
        "minimax-m3",
        ']<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="f">]<]minimax[>[<s>Oslo, 3'
        "]<]minimax[>[</s>]<]minimax[>[<n>3]<]minimax[>[</n>]<]minimax[>[</invoke>\n"
        "]<]minimax[>[</tool_call>",
        "minimax_m3",
    ),
    Native("mistral", f'[TOOL_CALLS][{{"name": "f", "arguments": {_ARGUMENTS}}}]'),
    Native("mistral-v11", f"[TOOL_CALLS]f[ARGS]{_ARGUMENTS}"),
    Native("mistral-v11", f"[TOOL_CALLS]f[CALL_ID]a1b2c3d4e[ARGS]{_ARGUMENTS}"),
    Native(
        "harmony", f"<|channel|>commentary to=functions.f <|constrain|>json<|message|>{_ARGUMENTS}"
    ),
    Native("llama-json", f'{{"name": "f", "parameters": {_ARGUMENTS}}}', "llama"),
    Native("pythonic", '[f(s="Oslo, 3", n=3)]'),
    Native("lfm2", '<|tool_call_start|>[f(s="Oslo, 3", n=3)]<|tool_call_end|>'),
    Native("olmo3", '<function_calls>f(s="Oslo, 3", n=3)</function_calls>'),
    Native("gemma4", '<|tool_call>call:f{s:<|"|>Oslo, 3<|"|>,n:3}<tool_call|>'),
    Native(
        "functiongemma",
        "<start_function_call>call:f{s:<escape>Oslo, 3<escape>,n:3}<end_function_call>",
    ),
    Native(
        "cohere",
        f'<|START_ACTION|>[\n    {{"tool_call_id": "0", "tool_name": "f", "parameters": '
        f"{_ARGUMENTS}}}"
        "\n]<|END_ACTION|>",
    ),
    Native("granite3", f'<|tool_call|>[{{"name": "f", "arguments": {_ARGUMENTS}}}]'),
    Native(
        "hunyuan-a13b", f'<tool_calls>[{{"name": "f", "arguments": {_ARGUMENTS}}}]</tool_calls>'
    ),
    Native(
        "inkling", f'f<|content_invoke_tool_json|>{{"name":"f","args":{_ARGUMENTS}}}<|end_message|>'
    ),
    Native(
        "step3",
        "<｜tool_calls_begin｜>\n<｜tool_call_begin｜>function<｜tool_sep｜>"
        '<steptml:invoke name="f">\n'
        '<steptml:parameter name="s">Oslo, 3</steptml:parameter>\n'
        '<steptml:parameter name="n">3</steptml:parameter>\n'
        "</steptml:invoke><｜tool_call_end｜>\n<｜tool_calls_end｜>",
    ),
    Native(
        "cohere-tags",
        '<cofl:tool_calls><cofl:tool_call id="0" name="f">'
        '<cofl:value name="s" type="raw">Oslo, 3</cofl:value>'
        '<cofl:value name="n" type="json">3</cofl:value>'
        "</cofl:tool_call></cofl:tool_calls>",
        "cohere",
    ),
    Native("apertus", f'<|tools_prefix|>[{{"f": {_ARGUMENTS}}}]<|tools_suffix|>'),
)
NARROW = {
    "type": "object",
    "properties": {"s": {"type": "string"}, "n": {"type": "integer"}},
    "required": ["s", "n"],
}
MUST = Wanted(tools=(Tool("f", NARROW, strict=True),), calls=Calls.REQUIRED)


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
    wanted = replace(MUST, calls=Calls.AUTO, answer=NARROW, thinking=Thinking.BEGUN)
    tag = _tag("hermes", wanted)
    call = NATIVE[0].call
    for answer in (_ARGUMENTS, '{\n  "s": "",\n  "n": 1\n}', call):
        assert tag.admits(f"hm\n</think>\n\n{answer}")
    for bad in (_ARGUMENTS, "</think>Hi", "</think>{}", f"{call}</think>{_ARGUMENTS}"):
        assert not tag.admits(bad)
    optional = _tag("hermes", replace(wanted, thinking=Thinking.MAY))
    assert optional.admits(_ARGUMENTS)
    assert optional.admits(f"<think>hm</think>{_ARGUMENTS}")
    assert _tag("think", Wanted(answer=NARROW)).admits(_ARGUMENTS)
    harmony = _tag("harmony", replace(wanted, thinking=Thinking.MAY))
    assert harmony.admits(
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>"
        + _ARGUMENTS
    )


def test_text_and_calls_alternate_unless_only_one_call_may_be_made() -> None:
    call = NATIVE[0].call
    many = _tag("hermes", replace(MUST, calls=Calls.AUTO))
    assert many.admits(f"First{call}then\n{call}.")
    assert many.admits("Nothing to call.")
    single = _tag("hermes", replace(MUST, calls=Calls.AUTO, parallel=False))
    assert single.admits(f"First{call}")
    assert not single.admits(f"{call}{call}")


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
    assert structural_tag(FORMATS["think"], replace(lax, calls=Calls.NONE)) is None
    for bound in (
        replace(lax, parallel=False),
        replace(lax, calls=Calls.REQUIRED),
        replace(lax, calls=Calls.NONE),
        replace(lax, only="f"),
        replace(lax, answer={}),
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
    wanted = Wanted(tools=(Tool("f", schema, strict=True),), calls=Calls.REQUIRED)
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
        "wanted = tags.Wanted(tools=(tags.Tool('f', {}),), calls=tags.Calls.REQUIRED)\n"
        "assert tags.structural_tag(families.FORMATS['hermes'], wanted)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
