"""A call of each format, in its maker's form to the space."""

from __future__ import annotations

from typing import NamedTuple


class Native(NamedTuple):
    name: str
    call: str
    builtin: str = ""
    """xgrammar's name of such a format."""


_DSML = """\n\n<｜DSML｜{0}>\n<｜DSML｜{1}invoke name="f">
<｜DSML｜{1}parameter name="s" string="true">Oslo, 3</｜DSML｜{1}parameter>
<｜DSML｜{1}parameter name="n" string="false">3</｜DSML｜{1}parameter>
</｜DSML｜{1}invoke>\n</｜DSML｜{0}>"""
ARGUMENTS = '{"s": "Oslo, 3", "n": 3}'
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
        "hermes", f'<tool_call>\n{{"name": "f", "arguments": {ARGUMENTS}}}\n</tool_call>', "qwen_3"
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
        f"{ARGUMENTS}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "deepseek_r1",
    ),
    Native(
        "deepseek-v3.1",
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{ARGUMENTS}"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "deepseek_v3_1",
    ),
    Native("deepseek-v3.2", _DSML.format("function_calls", ""), "deepseek_v3_2"),
    Native("deepseek-v4", _DSML.format("tool_calls", ""), "deepseek_v4"),
    Native("deepseek-v4.1", _DSML.format(" calls", " "), "deepseek_v4_1"),
    Native(
        "kimi-k2",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
        f"{ARGUMENTS}<|tool_call_end|><|tool_calls_section_end|>",
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
    Native("mistral", f'[TOOL_CALLS][{{"name": "f", "arguments": {ARGUMENTS}}}]'),
    Native("mistral-v11", f"[TOOL_CALLS]f[ARGS]{ARGUMENTS}"),
    Native("mistral-v11", f"[TOOL_CALLS]f[CALL_ID]a1b2c3d4e[ARGS]{ARGUMENTS}"),
    Native(
        "harmony", f"<|channel|>commentary to=functions.f <|constrain|>json<|message|>{ARGUMENTS}"
    ),
    Native("llama-json", f'{{"name": "f", "parameters": {ARGUMENTS}}}', "llama"),
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
        f"{ARGUMENTS}}}"
        "\n]<|END_ACTION|>",
    ),
    Native("granite3", f'<|tool_call|>[{{"name": "f", "arguments": {ARGUMENTS}}}]'),
    Native("hunyuan-a13b", f'<tool_calls>[{{"name": "f", "arguments": {ARGUMENTS}}}]</tool_calls>'),
    Native(
        "inkling", f'f<|content_invoke_tool_json|>{{"name":"f","args":{ARGUMENTS}}}<|end_message|>'
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
    Native("apertus", f'<|tools_prefix|>[{{"f": {ARGUMENTS}}}]<|tools_suffix|>'),
)
