"""A conversation that ends with the assistant: answered, or continued by vLLM's two fields."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from millstream_server.processor.text.tokenizer import TextModel
from millstream_testing.in_process import InProcessProcessor
from tests.support.clients.http_api import CHAT, HI, ask, client
from tests.support.processor.reading import reading_model, serving
from tests.support.processor.saying import saying

RESPONSES = "/v1/responses"
SAID = [*HI["messages"], {"role": "assistant", "content": "Let me"}]
REASONED = [*HI["messages"], {"role": "assistant", "content": "", "reasoning_content": "h"}]
CALLED = [
    *HI["messages"],
    {
        "role": "assistant",
        "content": "Let me",
        "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{}"}}],
    },
]
GO_ON = {"continue_final_message": True, "add_generation_prompt": False}
ANSWERED, CONTINUED = "user:hi|assistant:Let me|<think>", "user:hi|assistant:Let me"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return reading_model(tmp_path_factory.mktemp("model"))


@pytest_asyncio.fixture
async def front(model: TextModel) -> AsyncIterator[InProcessProcessor]:
    async with serving(model) as served:
        yield served


@pytest.mark.parametrize(
    ("fields", "says", "prompt"),
    [
        ({}, "hm</think> see.", ANSWERED),
        ({"add_generation_prompt": True}, "hm</think> see.", ANSWERED),
        ({"continue_final_message": False}, "hm</think> see.", ANSWERED),
        (GO_ON, " see.", CONTINUED),
        ({"continue_final_message": True}, " see.", CONTINUED),  # as SGLang's API has it
    ],
)
async def test_a_chat(
    front: InProcessProcessor, model: TextModel, fields: dict[str, Any], says: str, prompt: str
) -> None:
    asked: Any = {"model": "tiny", "messages": SAID, "extra_body": fields}
    async with client(front.address) as openai:
        with saying(model, says, says) as prompts:
            whole = await openai.chat.completions.create(**asked)
            stream = await openai.chat.completions.create(**asked, stream=True)
            deltas = [chunk.choices[0].delta.content async for chunk in stream]
    assert whole.choices[0].message.content == "".join(filter(None, deltas)) == " see."
    assert prompts == [prompt, prompt]
    body = {"model": "tiny", "messages": SAID, **fields}
    assert (await ask(front.port, f"{CHAT}/render", body)).json["prompt_text"] == prompt
    tokens = (await ask(front.port, "/tokenize", body)).json["tokens"]
    assert (await ask(front.port, "/detokenize", {"tokens": tokens})).json["prompt"] == prompt


async def test_reasoning_goes_on_as_reasoning(front: InProcessProcessor, model: TextModel) -> None:
    with saying(model, "m</think>Hi.") as prompts:
        response = await ask(front.port, CHAT, {"messages": REASONED, **GO_ON})
    message = response.json["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("m", "Hi.")
    assert prompts == ["user:hi|assistant:(h"]


@pytest.mark.parametrize(
    ("fields", "says", "prompt"), [({}, "hm</think> see.", ANSWERED), (GO_ON, " see.", CONTINUED)]
)
async def test_a_response(
    front: InProcessProcessor, model: TextModel, fields: dict[str, Any], says: str, prompt: str
) -> None:
    with saying(model, says) as prompts:
        response = await ask(front.port, RESPONSES, {"input": SAID, **fields})
    assert response.status == 200, response.body
    assert response.json["output"][-1]["content"][0]["text"] == " see."
    assert prompts == [prompt]


@pytest.mark.parametrize("path", [CHAT, f"{CHAT}/render", "/tokenize", RESPONSES])
@pytest.mark.parametrize(
    ("said", "fields", "says"),
    [
        (HI["messages"], GO_ON, "continue_final_message: the last message must be ASSISTANT's"),
        (SAID, {**GO_ON, "add_generation_prompt": True}, "add_generation_prompt: must be false"),
        (SAID, {"add_generation_prompt": False}, "add_generation_prompt: must be false with"),
    ],
)
async def test_what_contradicts_itself_is_refused_by_name(
    front: InProcessProcessor, path: str, said: Any, fields: Any, says: str
) -> None:
    key = "input" if path == RESPONSES else "messages"
    response = await ask(front.port, path, {key: said, **fields})
    error = response.json["error"]
    assert (response.status, error["param"]) == (400, says.partition(":")[0])
    assert error["message"].startswith(says)


@pytest.mark.parametrize("fields", [{}, GO_ON])
async def test_a_call_without_its_result_is_refused(
    front: InProcessProcessor, fields: dict[str, Any]
) -> None:
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    for path, said, param in (
        (CHAT, {"messages": CALLED}, "messages[1].tool_calls[0]"),
        (RESPONSES, {"input": [*SAID, call]}, "input[2]"),
    ):
        error = (await ask(front.port, path, {**said, **fields})).json["error"]
        assert error["param"] == param
        assert "send their results" in error["message"]


async def test_a_schema_can_not_be_kept_in_what_goes_on(front: InProcessProcessor) -> None:
    form = {"type": "json_object"}
    for path, asked, param in (
        (CHAT, {"messages": SAID, "response_format": form}, "response_format"),
        (RESPONSES, {"input": SAID, "text": {"format": form}}, "text.format"),
    ):
        error = (await ask(front.port, path, {**asked, **GO_ON})).json["error"]
        assert (error["param"], error["code"]) == (param, "invalid_request")
        assert "can't be kept" in error["message"]
