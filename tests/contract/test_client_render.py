"""The client's render and parse: a chat in three calls."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from millstream.v1 import chat_pb2
from millstream_client import Answer, AnswerReading, Client, InvalidRequestError, SyncClient
from millstream_server.engines.simulated.engine import SimulatedConfig
from millstream_server.engines.simulated.speech import Speech
from millstream_server.processor.text.tokenizer import TextModel
from millstream_testing.in_process import suite

MODEL = Path("demo/model")
ARGUMENTS = '{"name": "weather", "arguments": {"city": "Oslo"}}'
SAID = f"<think>Hm.</think>Let me see.<tool_call>\n{ARGUMENTS}\n</tool_call>"
QUESTION = f"Please say {json.dumps(SAID)}"


def weather(city: str) -> str:
    """Tell the weather."""
    return city


@pytest.fixture(scope="module")
def model() -> TextModel:
    return TextModel.load(MODEL)


@pytest.fixture
def config() -> SimulatedConfig:
    speech = Speech.load(MODEL)
    assert speech is not None
    return SimulatedConfig(vocab_size=4096, speech=speech, eos_token_id=speech.end)


def told(answer: Answer) -> tuple[Any, ...]:
    calls = [(c.name, c.arguments_json, c.incomplete) for c in answer.tool_calls]
    return answer.reasoning, answer.text, calls, answer.usage.reasoning_tokens


async def test_render_complete_parse_is_chat(model: TextModel, config: SimulatedConfig) -> None:
    async with suite(model, config) as (front, _), Client(front.address) as client:
        chatted = await client.chat(QUESTION, system="Be short.", tools=[weather]).answer()
        rendered = await client.render(QUESTION, system="Be short.", tools=[weather])
        completed = client.complete(
            rendered.token_ids, sampling=rendered.sampling, return_token_ids=True
        )
        token_ids = (await completed.answer()).choices[0].token_ids
        parsed = await client.parse(token_ids, rendered.reading)
    assert "Be short." in rendered.rendered_prompt
    assert len(rendered.token_ids) == chatted.usage.prompt_tokens
    assert told(parsed) == told(chatted)
    assert told(parsed)[:2] == ("Hm.", "Let me see.")
    assert (parsed.complete, parsed.model) == (True, chatted.model)
    message = parsed.to_message()
    assert message.role == chat_pb2.CHAT_ROLE_ASSISTANT
    assert [call.name for call in message.tool_calls] == ["weather"]


async def test_it_runs_without_asyncio(model: TextModel, config: SimulatedConfig) -> None:
    def use(address: str) -> Iterator[Any]:
        with SyncClient(address) as client:
            rendered = client.render([{"role": "user", "content": "Hi"}])
            yield client.detokenize(rendered.token_ids, special_tokens=True)
            yield rendered.rendered_prompt
            tools = [chat_pb2.ChatTool(name="weather")]
            yield told(client.parse(SAID, AnswerReading(format="hermes", tools=tools)))

    async with suite(model, config) as (front, _):
        shown, prompt, parsed = await asyncio.to_thread(lambda: list(use(front.address)))
    assert shown == prompt
    assert parsed == ("Hm.", "Let me see.", [("weather", '{"city": "Oslo"}', False)], 0)


async def test_what_is_wrong_is_named(model: TextModel, config: SimulatedConfig) -> None:
    async with suite(model, config) as (front, _), Client(front.address) as client:
        with pytest.raises(InvalidRequestError) as refused:
            await client.render("Hi", top_p=2.0)
        assert [v.field for v in refused.value.violations] == ["start.options.sampling.top_p"]
        with pytest.raises(InvalidRequestError) as refused:
            await client.parse("Hi", AnswerReading(format="morse"))
        assert refused.value.code is grpc.StatusCode.INVALID_ARGUMENT
        assert [v.field for v in refused.value.violations] == ["reading.format"]
