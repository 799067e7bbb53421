"""OpenAI's client over HTTP, on real SGLang, through a hand-off."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.e2e.conftest import Suite
from tests.support.clients.http_api import client

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(400)]

_SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 1, "maximum": 99}},
    "required": ["n"],
    "additionalProperties": False,
}
_LINES: Any = {
    "type": "grammar",
    "syntax": "lark",
    "definition": 'start: line~1..3\nline: "+" /[a-z"]{1,5}/ LF\n%import common.LF',
}
_HI: Any = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "temperature": 0}


def _without_thoughts(model: Path) -> dict[str, Any]:
    """Forbid what begins a marker: a model may think before its JSON, a random one for ever."""
    vocabulary = Tokenizer.from_file(str(model / "tokenizer.json")).get_vocab()
    begins = [number for token, number in vocabulary.items() if token.startswith("<")]
    return {"logit_bias": {str(number): -100 for number in begins}}


async def test_a_chat_streams_calls_a_tool_and_keeps_a_schema(suite: Suite) -> None:
    async with client(suite.front_disaggregated.address) as api:
        whole = await api.chat.completions.create(**_HI, max_tokens=12, logprobs=True)
        stream = await api.chat.completions.create(
            **_HI, max_tokens=12, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert text == whole.choices[0].message.content
        assert chunks[-1].usage == whole.usage
        logprobs: Any = whole.choices[0].logprobs
        assert len(logprobs.content) == 12

        form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": _SCHEMA}}
        kept = await api.chat.completions.create(
            **_HI, response_format=form, max_tokens=40, extra_body=_without_thoughts(suite.model)
        )
        assert 1 <= json.loads(kept.choices[0].message.content or "")["n"] <= 99

        function: Any = {"name": "count", "parameters": _SCHEMA}
        called = await api.chat.completions.create(
            **_HI,
            tools=[{"type": "function", "function": function}],
            tool_choice={"type": "function", "function": {"name": "count"}},
            parallel_tool_calls=False,
            max_tokens=200,
        )
    calls: Any = called.choices[0].message.tool_calls
    assert [call.function.name for call in calls] == ["count"]
    assert 1 <= json.loads(calls[0].function.arguments)["n"] <= 99
    assert called.choices[0].finish_reason == "tool_calls"


async def test_a_response_streams_the_same_items_and_keeps_a_schema(suite: Suite) -> None:
    function: Any = {"type": "function", "name": "count", "parameters": _SCHEMA, "strict": True}
    form: Any = {"format": {"type": "json_schema", "name": "x", "schema": _SCHEMA}}
    asked: Any = {"model": "tiny", "input": "hi", "temperature": 0}
    async with client(suite.front_disaggregated.address) as api:
        whole = await api.responses.create(**asked, max_output_tokens=12)
        stream = await api.responses.create(**asked, max_output_tokens=12, stream=True)
        *_, last = [event async for event in stream]
        assert (last.type, whole.status) == ("response.incomplete", "incomplete")
        assert last.response.output_text == whole.output_text
        assert last.response.usage == whole.usage

        kept = await api.responses.create(
            **asked, text=form, max_output_tokens=40, extra_body=_without_thoughts(suite.model)
        )
        assert 1 <= json.loads(kept.output_text)["n"] <= 99

        called = await api.responses.create(
            **asked,
            tools=[function],
            tool_choice={"type": "function", "name": "count"},
            parallel_tool_calls=False,
            max_output_tokens=200,
        )
        custom = await api.responses.create(
            **asked,
            tools=[{"type": "custom", "name": "add", "format": _LINES}],
            tool_choice={"type": "custom", "name": "add"},
            max_output_tokens=200,
        )
    (text,) = [item.input for item in custom.output if item.type == "custom_tool_call"]
    assert re.fullmatch('(?:[+][a-z"]{1,5}\n){1,3}', text)
    (call,) = [item for item in called.output if item.type == "function_call"]
    assert (call.name, call.status) == ("count", "completed")
    assert 1 <= json.loads(call.arguments)["n"] <= 99
