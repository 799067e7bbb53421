"""Writes answers as models write them, format by format: what parsers are tried on."""

from __future__ import annotations

import html
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Arguments = Mapping[str, Any]
_XML = "<function={name}>\n{arguments}</function>"
_XML_ARGUMENT = "<parameter={key}>\n{value}\n</parameter>\n"
_KV_ARGUMENT = "<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n"
_DSML = '<｜DSML｜{gap}invoke name="{name}">\n{arguments}</｜DSML｜{gap}invoke>\n'
_DSML_ARGUMENT = (
    '<｜DSML｜{gap}parameter name="{key}" string="{string}">{value}</｜DSML｜{gap}parameter>\n'
)


def plain(value: Any) -> str:
    """Write a string as it is, anything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def quoted(quote: str) -> Callable[[Any], str]:
    """Write Google's literals, with strings between ``quote``."""

    def write(value: Any) -> str:
        if isinstance(value, str):
            return f"{quote}{value}{quote}"
        if isinstance(value, list):
            return f"[{','.join(map(write, value))}]"
        if isinstance(value, dict):
            return "{" + ",".join(f"{write(k)}:{write(v)}" for k, v in value.items()) + "}"
        return json.dumps(value)

    return write


def _elements(value: Any) -> str:
    """Write MiniMax M3's nested elements."""
    before = "]<]minimax[>["
    if isinstance(value, dict):
        return "".join(
            f"{before}<{key}>{_elements(each)}{before}</{key}>" for key, each in value.items()
        )
    if isinstance(value, list):
        return "".join(f"{before}<item>{_elements(each)}{before}</item>" for each in value)
    return plain(value)


def _typed_elements(value: Any) -> str:
    """Write Cohere's nested elements."""
    if isinstance(value, dict):
        items = [(f' name="{html.escape(key)}"', each) for key, each in value.items()]
    elif isinstance(value, list):
        items = [("", each) for each in value]
    else:
        return plain(value)
    return "".join(
        f'<cofl:value{name} type="{_KINDS.get(type(each), "json")}">'
        f"{_typed_elements(each)}</cofl:value>"
        for name, each in items
    )


_KINDS: dict[type, str] = {str: "raw", dict: "dict", list: "list"}


@dataclass(frozen=True, kw_only=True)
class Writer:
    """How a format's models write."""

    call: str
    """A call: ``{name}``, ``{arguments}``, ``{index}``."""
    argument: str = ""
    """One of the arguments, ``{key}``, ``{value}``; empty: they are JSON."""
    value: Callable[[Any], str] = plain
    divider: str = ""
    """What stands between two arguments."""
    begin: str = ""
    """What stands before all calls."""
    between: str = ""
    end: str = ""
    thinking: str = ""
    """Reasoning; empty: there is none."""
    text: str = "%s"
    prompt: str = ""
    gap: str = ""

    def write(
        self,
        thinking: str,
        text: str,
        calls: Sequence[tuple[str, Arguments]],
        *,
        ascii_only: bool = False,
    ) -> str:
        """Return an answer."""
        made = [
            self.call.replace("{gap}", self.gap)
            .replace("{name}", name)
            .replace("{index}", str(index))
            .replace("{arguments}", self._arguments(arguments, ascii_only=ascii_only))
            for index, (name, arguments) in enumerate(calls)
        ]
        parts = [
            self.thinking % thinking if thinking and self.thinking else "",
            self.text % text if text else "",
            self.begin + self.between.join(made) + self.end if made else "",
        ]
        return "".join(parts).removeprefix(self.prompt)

    def _arguments(self, arguments: Arguments, *, ascii_only: bool) -> str:
        if not self.argument:
            return json.dumps(arguments, ensure_ascii=ascii_only)
        written = [
            self.argument.replace("{gap}", self.gap)
            .replace("{key}", key)
            .replace("{string}", str(isinstance(value, str)).lower())
            .replace("{type}", _TYPES[type(value)])
            .replace("{kind}", _KINDS.get(type(value), "json"))
            .replace("{value}", self.value(value))
            for key, value in arguments.items()
        ]
        return self.divider.join(written)


_TYPES = {
    str: "string",
    bool: "boolean",
    int: "number",
    float: "number",
    list: "array",
    dict: "object",
    type(None): "null",
}
_THINK = "<think>\n%s\n</think>\n\n"
_PYTHON: dict[str, Any] = {
    "call": "{name}({arguments})",
    "argument": "{key}={value}",
    "value": repr,
    "divider": ", ",
}
_JSON = '{"name": "{name}", "arguments": {arguments}}'
_DEEPSEEK: dict[str, Any] = {
    "begin": "<｜tool▁calls▁begin｜>",
    "end": "<｜tool▁calls▁end｜>",
    "thinking": "<think>%s</think>",
}


def _dsml(section: str, gap: str = "") -> Writer:
    return Writer(
        call=_DSML,
        argument=_DSML_ARGUMENT,
        gap=gap,
        begin=f"\n\n<｜DSML｜{section}>\n",
        end=f"</｜DSML｜{section}>",
        thinking="<think>%s</think>",
    )


WRITERS: dict[str, Writer] = {
    "hermes": Writer(
        call=f"<tool_call>\n{_JSON}\n</tool_call>", begin="\n", between="\n", thinking=_THINK
    ),
    "qwen-xml": Writer(
        call=f"<tool_call>\n{_XML}\n</tool_call>",
        argument=_XML_ARGUMENT,
        begin="\n\n",
        between="\n",
        thinking=_THINK,
    ),
    "seed": Writer(
        call=f"<seed:tool_call>\n{_XML}\n</seed:tool_call>",
        argument=_XML_ARGUMENT,
        begin="\n",
        between="\n",
        thinking="<seed:think>\n%s\n</seed:think>\n",
    ),
    "glm-kv": Writer(
        call="<tool_call>{name}\n{arguments}</tool_call>",
        argument=_KV_ARGUMENT,
        begin="\n",
        between="\n",
        thinking="<think>%s</think>\n",
    ),
    "hunyuan": Writer(
        call="<tool_call>{name}<tool_sep>\n{arguments}</tool_call>",
        argument=_KV_ARGUMENT,
        begin="<tool_calls>\n",
        between="\n",
        end="\n</tool_calls>",
        thinking="<think>%s</think>",
    ),
    "hunyuan-a13b": Writer(
        call=_JSON,
        begin="<tool_calls>[",
        between=", ",
        end="]</tool_calls>",
        thinking="<think>\n%s\n</think>\n",
    ),
    "deepseek-v3": Writer(
        call="<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜>",
        between="\n",
        **_DEEPSEEK,
    ),
    "deepseek-v3.1": Writer(
        call="<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>", **_DEEPSEEK
    ),
    "deepseek-v3.2": _dsml("function_calls"),
    "deepseek-v4": _dsml("tool_calls"),
    "deepseek-v4.1": _dsml(" calls", " "),
    "kimi-k2": Writer(
        call="<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>{arguments}"
        "<|tool_call_end|>",
        begin="<|tool_calls_section_begin|>",
        end="<|tool_calls_section_end|>",
        thinking="<think>%s</think>",
    ),
    "kimi-k3": Writer(
        call='<|open|>call tool="{name}" index="{index}"<|sep|>{arguments}<|close|>call<|sep|>',
        argument='<|open|>argument key="{key}" type="{type}"<|sep|>{value}<|close|>argument<|sep|>',
        begin="<|open|>tools<|sep|>",
        end="<|close|>tools<|sep|><|close|>message<|sep|>",
        thinking="<|open|>think<|sep|>%s<|close|>think<|sep|>",
        text="<|open|>response<|sep|>%s<|close|>response<|sep|>",
    ),
    "minimax-m2": Writer(
        call='<invoke name="{name}">\n{arguments}</invoke>\n',
        argument='<parameter name="{key}">{value}</parameter>\n',
        begin="\n\n<minimax:tool_call>\n",
        end="</minimax:tool_call>",
        thinking=_THINK,
    ),
    "minimax-m3": Writer(
        call=']<]minimax[>[<invoke name="{name}">{arguments}]<]minimax[>[</invoke>\n',
        argument="]<]minimax[>[<{key}>{value}]<]minimax[>[</{key}>",
        value=_elements,
        begin="]<]minimax[>[<tool_call>\n",
        end="]<]minimax[>[</tool_call>",
        thinking="<mm:think>%s</mm:think>",
    ),
    "mistral": Writer(call=_JSON, begin="[TOOL_CALLS][", between=", ", end="]"),
    "mistral-v11": Writer(call="[TOOL_CALLS]{name}[ARGS]{arguments}", thinking="[THINK]%s[/THINK]"),
    "harmony": Writer(
        call="<|start|>assistant<|channel|>commentary to=functions.{name} <|constrain|>json"
        "<|message|>{arguments}<|call|>",
        thinking="<|channel|>analysis<|message|>%s<|end|>",
        text="<|start|>assistant<|channel|>final<|message|>%s<|end|>",
        prompt="<|start|>assistant",
    ),
    "llama-json": Writer(
        call='{"name": "{name}", "parameters": {arguments}}', begin="<|python_tag|>", between="; "
    ),
    "pythonic": Writer(begin="<|python_start|>[", between=", ", end="]<|python_end|>", **_PYTHON),
    "lfm2": Writer(
        begin="<|tool_call_start|>[",
        between=", ",
        end="]<|tool_call_end|>",
        thinking="<think>%s</think>\n",
        **_PYTHON,
    ),
    "olmo3": Writer(
        begin="<function_calls>\n",
        between="\n",
        end="\n</function_calls>",
        thinking="<think>%s</think>",
        **_PYTHON,
    ),
    "gemma4": Writer(
        call="<|tool_call>call:{name}{{arguments}}<tool_call|>",
        argument="{key}:{value}",
        value=quoted('<|"|>'),
        divider=",",
        thinking="<|channel>thought\n%s<channel|>",
    ),
    "functiongemma": Writer(
        call="<start_function_call>call:{name}{{arguments}}<end_function_call>",
        argument="{key}:{value}",
        value=quoted("<escape>"),
        divider=",",
    ),
    "cohere": Writer(
        call='    {"tool_call_id": "{index}", "tool_name": "{name}", "parameters": {arguments}}',
        begin="<|START_ACTION|>[\n",
        between=",\n",
        end="\n]<|END_ACTION|>",
        thinking="<|START_THINKING|>%s<|END_THINKING|>",
        text="<|START_RESPONSE|>%s<|END_RESPONSE|>",
    ),
    "cohere-tags": Writer(
        call='<cofl:tool_call id="{index}" name="{name}">{arguments}</cofl:tool_call>',
        argument='<cofl:value name="{key}" type="{kind}">{value}</cofl:value>',
        value=_typed_elements,
        begin="<cofl:tool_calls>",
        end="</cofl:tool_calls>",
        thinking="<|START_THINKING|>%s<|END_THINKING|>",
        text="<|START_TEXT|>%s<|END_TEXT|>",
    ),
    "granite3": Writer(
        call=_JSON, begin="<|tool_call|>[", between=", ", end="]", thinking="<think>%s</think>"
    ),
    "apertus": Writer(
        call='{"{name}": {arguments}}',
        begin="<|tools_prefix|>[",
        between=", ",
        end="]<|tools_suffix|>",
        thinking="<|inner_prefix|>%s<|inner_suffix|>",
    ),
    "inkling": Writer(
        call='{name}<|content_invoke_tool_json|>{"name":"{name}","args":{arguments}}<|end_message|>',
        between="<|message_model|>",
        thinking="<|content_thinking|>%s<|end_message|><|message_model|>",
        text="<|content_text|>%s<|end_message|><|message_model|>",
        prompt="<|message_model|>",
    ),
    "step3": Writer(
        call='<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="{name}">\n'
        "{arguments}</steptml:invoke><｜tool_call_end｜>\n",
        argument='<steptml:parameter name="{key}">{value}</steptml:parameter>\n',
        begin="<｜tool_calls_begin｜>\n",
        end="<｜tool_calls_end｜>",
        thinking=_THINK,
    ),
}
"""Every format with calls has one."""
