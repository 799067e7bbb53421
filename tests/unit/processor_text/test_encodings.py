"""Chat encodings of ours, for checkpoints whose own is code: equal to the makers'."""

from __future__ import annotations

import functools
import json
from datetime import datetime, tzinfo
from typing import Any, Self

import pytest

from millstream_server.formats.families import FORMATS
from millstream_server.processor.text import sandbox
from millstream_server.processor.text.encodings import Encoding, find_encoding
from millstream_server.processor.text.messages import ChatMessage, ChatRole, Tool, ToolCall
from millstream_server.processor.text.switches import thinking
from millstream_server.processor.text.template import ChatTemplate
from millstream_server.runtime.errors import InvalidRequestError, UnsupportedFeatureError
from tests.support.answers import parser, read
from tests.support.models.encoding_goldens import (
    CONVERSATIONS,
    GOLDENS,
    TEKKEN_EFFORTS,
    TOOLS,
)
from tests.support.models.harmony_goldens import DATE, SCHEMA_TOOLS

CASES = [
    golden
    for file in sorted(GOLDENS.glob("*.json"))
    for golden in json.loads(file.read_text("utf-8"))
]
NAMES = {"bos_token": "<s>", "eos_token": "</s>"}
MODEL_TYPES = {
    "deepseek-v3.2": "deepseek_v32",
    "deepseek-v4": "deepseek_v4",
    "deepseek-v4.1": "deepseek_v41",
    "harmony": "gpt_oss",
    "kimi-k3": "kimi_k3",
}


class FixedDate(datetime):
    """The day on which the goldens were made."""

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> Self:
        return cls.fromisoformat(DATE).replace(tzinfo=tz)


def encoding(name: str) -> Encoding:
    """Return the encoding of a checkpoint that has no template."""
    maker, _, version = name.partition("-")
    tekken = version if maker == "mistral" else ""
    efforts = TEKKEN_EFFORTS if tekken == "v15" else ()
    found = find_encoding({"model_type": MODEL_TYPES.get(name)}, {}, tekken, efforts)
    assert found is not None
    assert found.name == name
    return found


@functools.cache
def chat_template(name: str) -> ChatTemplate:
    return ChatTemplate({"default": encoding(name).template}, NAMES)


def messages(given: list[dict[str, Any]], *, reasons: bool) -> list[ChatMessage]:
    return [
        ChatMessage(
            ChatRole(said["role"]),
            said["content"],
            tuple(
                ToolCall(call["id"], call["function"]["name"], call["function"]["arguments"])
                for call in said.get("tool_calls", ())
            ),
            said.get("tool_call_id", ""),
            reasoning="hm" if reasons and said["role"] == "assistant" else "",
        )
        for said in given
    ]


def tools(given: list[dict[str, Any]]) -> list[Tool]:
    functions = [tool["function"] for tool in given]
    return [Tool(f["name"], f["description"], json.dumps(f["parameters"])) for f in functions]


def named(golden: dict[str, Any]) -> str:
    what = "schemas" if golden.get("schemas") else golden["conversation"]
    return f"{golden['encoding']}, {what}, {golden['variables']}"


@pytest.mark.parametrize("golden", CASES, ids=named)
def test_a_prompt_is_the_makers(golden: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "datetime", FixedDate)
    given, with_tools = CONVERSATIONS[golden["conversation"]]
    known = SCHEMA_TOOLS if golden.get("schemas") else TOOLS if with_tools else []
    template = chat_template(golden["encoding"])
    reasons = golden["encoding"] == "harmony" or golden["variables"].get("thinking", False)
    prompt = template.render(
        messages(given, reasons=reasons), tools(known), variables=golden["variables"]
    )
    assert prompt == golden["prompt"]


def plain(name: str, thinking: object, conversation: str) -> str:
    """Return the prompt of a conversation without an effort."""
    variables = {} if thinking is None else {"thinking": thinking}
    told = {"encoding": name, "conversation": conversation, "variables": variables}
    found: str = next(golden["prompt"] for golden in CASES if told.items() <= golden.items())
    return found


@pytest.mark.parametrize(
    ("name", "thinking"),
    sorted(
        {(golden["encoding"], golden["variables"].get("thinking")) for golden in CASES}, key=str
    ),
)
def test_an_answer_that_a_prompt_shows_is_read_as_the_models_own(
    name: str, *, thinking: bool | None
) -> None:
    asked, answered = (plain(name, thinking, what) for what in ("tools", "a result"))
    assert answered.startswith(asked)
    form = FORMATS[encoding(name).answers]
    parts = read(parser(form, prompt=asked), [answered.removeprefix(asked)])
    _, _, tool, arguments = next(part for part in parts if part[0] == "call")
    assert (tool, json.loads(arguments)) == ("weather", {"city": "Zürich", "n": 2})
    reasons = thinking or name == "harmony"
    assert [part[1] for part in parts if part[0] == "reasoning"] == ["hm"] * bool(reasons)


def test_there_are_goldens_of_each_encoding() -> None:
    assert {golden["encoding"] for golden in CASES} == {
        *MODEL_TYPES,
        *(f"mistral-v{version}" for version in (3, 7, 11, 13, 15)),
    }


def test_an_unknown_version_or_model_has_no_encoding() -> None:
    assert find_encoding({}, {}, "v99") is None
    assert find_encoding({"model_type": "llama"}, {}) is None


@pytest.mark.parametrize("name", MODEL_TYPES)
def test_a_result_without_its_call_is_refused_with_a_sentence(name: str) -> None:
    template = chat_template(name)
    stray = [ChatMessage(ChatRole.USER, "hi"), ChatMessage(ChatRole.TOOL, "x", tool_call_id="1")]
    with pytest.raises(InvalidRequestError, match="must follow the answer with its call"):
        template.render(stray)


def test_only_a_mistral_that_names_efforts_can_be_told_one() -> None:
    off, field = thinking(on=False), "start.reasoning.enabled"
    newest = chat_template("mistral-v15")
    assert newest.variable(off, field) == ("reasoning_effort", "none")
    with pytest.raises(InvalidRequestError, match="reasoning_effort must be none or high"):
        newest.render([ChatMessage(ChatRole.USER, "hi")], variables={"reasoning_effort": "low"})
    with pytest.raises(UnsupportedFeatureError, match="no variable"):
        chat_template("mistral-v13").variable(off, field)


CLOSES_REASONING = dict.fromkeys(MODEL_TYPES, "</think>") | {
    "harmony": "<|end|><|start|>assistant<|channel|>final<|message|>",
    "kimi-k3": "<|close|>think<|sep|><|open|>response<|sep|>",
}
OPENS_REASONING = {"harmony": "<|channel|>analysis<|message|>"}
"""Where the prompt of a question leaves it to the model whether it reasons."""


@pytest.mark.parametrize("name", MODEL_TYPES)
def test_a_continued_answer_is_behind_what_a_question_ends_with(name: str) -> None:
    template = chat_template(name)
    asked = [ChatMessage(ChatRole.USER, "hi")]
    begun = ChatMessage(ChatRole.ASSISTANT, "No", reasoning="hm")
    on = {"thinking": True}
    prompt = template.render([*asked, begun], continues="it", variables=on)
    reasons = f"{OPENS_REASONING.get(name, '')}hm{CLOSES_REASONING[name]}"
    assert prompt == template.render(asked, variables=on) + f"{reasons}No"


def test_gpt_oss_template_is_ours_only_where_its_own_hides_calls() -> None:
    config = {"model_type": "gpt_oss"}
    hides = {"default": "{% set tool_call = message.tool_calls[0] %}"}
    found = find_encoding(config, hides)
    assert found is not None
    assert (found.name, found.reason) == (
        "harmony",
        "the checkpoint's template shows only the first of several calls",
    )
    assert find_encoding(config, {"default": "{{ messages }}"}) is None
    assert find_encoding({"model_type": "llama"}, hides) is None


@pytest.mark.parametrize("name", ["deepseek-v4", "deepseek-v4.1", "kimi-k3"])
def test_an_effort_that_the_model_does_not_know_is_refused(name: str) -> None:
    template = chat_template(name)
    asked = [ChatMessage(ChatRole.USER, "hi")]
    with pytest.raises(InvalidRequestError, match="reasoning_effort must be low, high or max"):
        template.render(asked, variables={"reasoning_effort": "extreme"})
    off = template.render(asked, variables={"reasoning_effort": "none"})
    assert off == template.render(asked, variables={"thinking": False})
