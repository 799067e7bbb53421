"""What events answers consist of, in order: chats' chunks, Responses' items, Messages' blocks.

Each event is also what the vendor's package takes for one.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import pytest_asyncio
from anthropic.types import RawMessageStreamEvent
from openai.types.chat import ChatCompletionChunk
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from millstream_server.processor.text.tokenizer import TextModel
from millstream_server.runtime.errors import InternalError
from millstream_testing.in_process import InProcessProcessor
from tests.support.clients.http_api import ask
from tests.support.processor.reading import CALL, reading_model, serving
from tests.support.processor.saying import Breaking, saying

SCHEMA = {"type": "object", "properties": {"s": {"type": "string"}}}
HI = [{"role": "user", "content": "hi"}]
DONE = "[DONE]"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return reading_model(tmp_path_factory.mktemp("model"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def front(model: TextModel) -> AsyncIterator[InProcessProcessor]:
    async with serving(model) as served:
        yield served


@dataclass(frozen=True)
class Case:
    """An answer, and the kinds of its events; neighbours of one kind are one."""

    said: str | Breaking
    chat: str
    responses: str
    messages: str
    most: int = 300
    stop: str = "zz"


CREATED = "created in_progress"
TEXT = "added:message part text"
TEXT_DONE = "text.done part.done done:completed"
TEXT_CUT = "text.done part.done done:incomplete"
THOUGHT = "added:reasoning part thought"
THOUGHT_DONE = "thought.done part.done done:completed"
CALLED = "added:function_call arguments arguments.done done:completed"
CASES = {
    "text": Case(
        "</think>Hi.",
        "role content finish:stop",
        f"{CREATED} {TEXT} {TEXT_DONE} completed",
        "start text+ text- text. stop:end_turn",
    ),
    "reasoning, then text": Case(
        "hm</think>Hi.",
        "role reasoning content finish:stop",
        f"{CREATED} {THOUGHT} {THOUGHT_DONE} {TEXT} {TEXT_DONE} completed",
        "start thinking+ thinking- signature thinking. text+ text- text. stop:end_turn",
    ),
    "text, call, text": Case(
        f"</think>So.{CALL}Done.",
        "role content call arguments content finish:tool_calls",
        f"{CREATED} {TEXT} {TEXT_DONE} {CALLED} {TEXT} {TEXT_DONE} completed",
        "start text+ text- text. tool_use+ json tool_use. text+ text- text. stop:tool_use",
    ),
    "two calls": Case(
        f"</think>{CALL}\n{CALL}",
        "role call arguments call arguments finish:tool_calls",
        f"{CREATED} {CALLED} {CALLED} completed",
        "start tool_use+ json tool_use. tool_use+ json tool_use. stop:tool_use",
    ),
    "a call that the length cuts": Case(
        f"</think>{CALL}",
        "role call arguments finish:length",
        f"{CREATED} added:function_call arguments arguments.done done:incomplete incomplete",
        "start tool_use+ json tool_use. stop:max_tokens",
        most=len("</think>") + CALL.index("lo"),
    ),
    "reasoning that the length cuts": Case(
        "hm, and so on",
        "role reasoning finish:length",
        f"{CREATED} {THOUGHT} thought.done part.done done:incomplete incomplete",
        "start thinking+ thinking- signature thinking. stop:max_tokens",
        most=5,
    ),
    "a stop string": Case(
        "</think>Let me see.",
        "role content finish:stop",
        f"{CREATED} {TEXT} {TEXT_DONE} completed",
        "start text+ text- text. stop:stop_sequence",
        stop="se",
    ),
    "a failure": Case(
        Breaking("hm</think>Hi", InternalError("broken")),
        "role reasoning content error",
        f"{CREATED} {THOUGHT} {THOUGHT_DONE} {TEXT} failed",
        "start thinking+ thinking- signature thinking. text+ text- error",
    ),
    "nothing": Case(
        "",
        "role finish:stop",
        f"{CREATED} added:message part text.done part.done done:completed completed",
        "start stop:end_turn",
    ),
}


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("name", CASES)
async def test_chunks_of_a_chat(front: InProcessProcessor, model: TextModel, name: str) -> None:
    case = CASES[name]
    with saying(model, case.said):
        asked = {"messages": HI, "max_tokens": case.most, "stop": case.stop}
        asked |= {"stream_options": {"include_usage": True}}
        tools = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]
        found = await streamed(front, "/v1/chat/completions", {**asked, "tools": tools})
    ends = ["usage"] if "error" not in case.chat else []
    assert kinds(found, _of_chunk) == [*case.chat.split(), *ends, DONE]


@pytest.mark.asyncio(loop_scope="module")
async def test_chunks_of_two_choices(front: InProcessProcessor, model: TextModel) -> None:
    with saying(model, "hm</think>Hi.", "</think>Ho."):
        found = await streamed(front, "/v1/chat/completions", {"messages": HI, "n": 2})
    assert found.pop() == DONE
    for index, expected in enumerate(("role reasoning content", "role content")):
        own = [event for event in found if event["choices"][0]["index"] == index]
        assert kinds(own, _of_chunk) == [*expected.split(), "finish:stop"]


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("name", CASES)
async def test_items_of_a_response(front: InProcessProcessor, model: TextModel, name: str) -> None:
    case = CASES[name]
    with saying(model, case.said):
        asked = {"input": HI, "max_output_tokens": case.most, "stop": case.stop}
        tools = [{"type": "function", "name": "f", "parameters": SCHEMA}]
        found = await streamed(front, "/v1/responses", {**asked, "tools": tools})
    assert kinds(found, _of_response) == [*case.responses.split(), DONE]


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("name", CASES)
async def test_blocks_of_a_message(front: InProcessProcessor, model: TextModel, name: str) -> None:
    case = CASES[name]
    with saying(model, case.said):
        asked = {"messages": HI, "max_tokens": case.most, "stop_sequences": [case.stop]}
        tools = [{"name": "f", "input_schema": SCHEMA}]
        found = await streamed(front, "/v1/messages", {**asked, "tools": tools})
    *ends, last = kinds(found, _Blocks())
    assert ends == case.messages.split()[: len(ends)]
    assert last == ("message_stop" if "error" not in case.messages else "error")


async def streamed(front: InProcessProcessor, path: str, asked: dict[str, Any]) -> list[Any]:
    """Return the data of a stream's events; each has its type as name, where it has a name."""
    response = await ask(front.port, path, {"model": "tiny", "stream": True, **asked})
    assert response.status == 200
    *events, end = response.body.decode().split("\n\n")
    assert end == ""
    found: list[Any] = []
    for event in events:
        *names, data = event.split("\n")
        text = data.removeprefix("data: ")
        found.append(text if text == DONE else json.loads(text))
        assert not names or names == [f"event: {found[-1]['type']}"]
    return found


def kinds(found: list[Any], kinds_of: Any) -> list[str]:
    """Return the events' kinds, without those that are like the one before."""
    named = [[DONE] if event == DONE else list(kinds_of(event)) for event in found]
    return [kind for kind, _ in itertools.groupby(itertools.chain.from_iterable(named))]


def _of_chunk(event: dict[str, Any]) -> Iterator[str]:
    """Yield a chunk's kinds: the first one may have the role and a text."""
    if "error" in event:
        yield "error"
        return
    ChatCompletionChunk.model_validate(event)
    if not event["choices"]:
        yield "usage"
        return
    (choice,) = event["choices"]
    delta = choice["delta"]
    if "role" in delta:
        yield "role"
    for name, kind in (("reasoning", "reasoning"), ("content", "content")):
        if delta.get(name):
            yield kind
    for call in delta.get("tool_calls", ()):
        yield "call" if "id" in call else "arguments"
    if choice["finish_reason"]:
        yield f"finish:{choice['finish_reason']}"


_RESPONSES: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
_SHORT = {
    "content_part.added": "part",
    "content_part.done": "part.done",
    "output_text.delta": "text",
    "output_text.done": "text.done",
    "reasoning_text.delta": "thought",
    "reasoning_text.done": "thought.done",
    "function_call_arguments.delta": "arguments",
    "function_call_arguments.done": "arguments.done",
}


def _of_response(event: dict[str, Any]) -> Iterator[str]:
    _RESPONSES.validate_python(event)
    kind = event["type"].removeprefix("response.")
    if kind == "output_item.added":
        yield f"added:{event['item']['type']}"
    elif kind == "output_item.done":
        yield f"done:{event['item']['status']}"
    else:
        yield _SHORT.get(kind, kind)


class _Blocks:
    """Names the events of a message: an end has its block's type, which the event hasn't."""

    _events: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)

    def __init__(self) -> None:
        self._block = ""

    def __call__(self, event: dict[str, Any]) -> Iterator[str]:
        kind = event["type"]
        if kind == "error":
            yield kind
            return
        self._events.validate_python(event)
        if kind == "content_block_start":
            self._block = event["content_block"]["type"]
            yield f"{self._block}+"
        elif kind == "content_block_delta":
            delta = event["delta"]["type"]
            yield {"signature_delta": "signature", "input_json_delta": "json"}.get(
                delta, f"{self._block}-"
            )
        elif kind == "content_block_stop":
            yield f"{self._block}."
        elif kind == "message_delta":
            yield f"stop:{event['delta']['stop_reason']}"
        else:
            yield {"message_start": "start"}.get(kind, kind)
