"""A call that was cut, or that a client wrote otherwise, can be sent back, on every endpoint."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from millstream.v1 import chat_pb2, processor_pb2
from millstream_server.processor.text.tokenizer import TextModel
from millstream_testing.in_process import InProcessProcessor
from tests.support.clients.http_api import CHAT, ask
from tests.support.processor.chats import chat
from tests.support.processor.reading import reading_model, serving
from tests.support.processor.saying import saying


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return reading_model(tmp_path_factory.mktemp("model"))


@pytest_asyncio.fixture
async def front(model: TextModel) -> AsyncIterator[InProcessProcessor]:
    async with serving(model) as served:
        yield served


HISTORY = [
    ('{"s": "Os', '{"input": "{\\"s\\": \\"Os"}'),
    ("[1, 2.50]", '{"input": "[1, 2.50]"}'),
    ("7", '{"input": "7"}'),
    ('{"s": "\\ud83d"}', '{"input": "{\\"s\\": \\"\\\\ud83d\\"}"}'),
    ('{"s": NaN}', '{"input": "{\\"s\\": NaN}"}'),
    ('{"a":' * 40 + "{}" + "}" * 40, None),
    ("null", "{}"),
    ("", "{}"),
    ('{"s": "Oslo"}', '{"s": "Oslo"}'),
]
"""Arguments, and as what the template has them; None: in a text."""


def _body(door: str, arguments: Any) -> dict[str, Any]:
    if door == "/v1/responses":
        items = [
            {"role": "user", "content": "hi"},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": arguments},
            {"type": "function_call_output", "call_id": "c", "output": "-3"},
        ]
        return {"input": items}
    if door == "/v1/messages":
        use = {"type": "tool_use", "id": "c", "name": "f", "input": arguments}
        result = {"type": "tool_result", "tool_use_id": "c", "content": "-3"}
        said = [("user", "hi"), ("assistant", [use]), ("user", [result])]
        found = [{"role": role, "content": content} for role, content in said]
        return {"messages": found, "max_tokens": 9}
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {
        "messages": [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": "-3"},
        ]
    }


def _shown(prompt: str) -> str:
    return prompt.partition("[c f ")[2].partition("]|tool:-3|")[0]


@pytest.mark.parametrize(("arguments", "shown"), HISTORY)
async def test_a_call_that_was_cut_can_be_sent_back(
    front: InProcessProcessor, model: TextModel, arguments: str, shown: str | None
) -> None:
    call = chat_pb2.ToolCall(id="c", name="f", arguments_json=arguments, incomplete=True)
    said = [
        chat_pb2.ChatMessage(
            role=chat_pb2.CHAT_ROLE_USER, content=[chat_pb2.ContentPart(text="hi")]
        ),
        chat_pb2.ChatMessage(role=chat_pb2.CHAT_ROLE_ASSISTANT, tool_calls=[call]),
        chat_pb2.ChatMessage(
            role=chat_pb2.CHAT_ROLE_TOOL,
            tool_call_id="c",
            content=[chat_pb2.ContentPart(text="-3")],
        ),
    ]
    with saying(model, *["So."] * 4) as prompts:
        for path in (CHAT, "/v1/responses", "/v1/messages"):
            response = await ask(front.port, path, _body(path, arguments))
            assert response.status == 200, (path, response.body)
        await chat(front.stub, messages=said)
    conversation = processor_pb2.Conversation(messages=said)
    tokenized = await front.stub.Tokenize(processor_pb2.TokenizeRequest(conversation=conversation))
    found = {_shown(prompt) for prompt in [*prompts, tokenized.rendered_prompt]}
    assert found == {json.dumps({"input": arguments}) if shown is None else shown}


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ({"s": "Oslo", "n": 1}, '{"s": "Oslo", "n": 1}'),
        (None, "{}"),
        ([1, "a"], '{"input": "[1, \\"a\\"]"}'),
        (7, '{"input": "7"}'),
    ],
)
async def test_arguments_may_be_json_itself(
    front: InProcessProcessor, model: TextModel, arguments: Any, shown: str
) -> None:
    with saying(model, *["So."] * 3) as prompts:
        for path in (CHAT, "/v1/responses", "/v1/messages"):
            response = await ask(front.port, path, _body(path, arguments))
            assert response.status == 200, (path, response.body)
    assert {_shown(prompt) for prompt in prompts} == {shown}
