"""What a client leaves to the Processor: whether an answer is read, and what its template has."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from millstream.v1 import chat_pb2, processor_pb2
from millstream_server.processor.text.tokenizer import TextModel
from millstream_testing.in_process import MODEL, InProcessProcessor, processor, worker
from tests.support.processor.chats import chat, message, options
from tests.support.processor.reading import reading_model, serving
from tests.support.wire.failures import refusal

WHERE_NEEDED = processor_pb2.CHAT_OUTPUT_WHERE_NEEDED
TOOL = chat_pb2.ChatTool(name="f")
REASONING = processor_pb2.ReasoningOptions


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return reading_model(tmp_path_factory.mktemp("model"))


@pytest_asyncio.fixture
async def front(model: TextModel) -> AsyncIterator[InProcessProcessor]:
    async with serving(model) as served:
        yield served


async def _started(front: InProcessProcessor, **fields: Any) -> processor_pb2.TurnStarted:
    opts = options(3, describe_start=True, top_p=0.5, temperature=0.0)
    answer = await chat(front.stub, "hi", opts=opts, output=WHERE_NEEDED, **fields)
    assert answer.started is not None
    return answer.started


async def test_an_answer_that_can_have_reasoning_is_read(front: InProcessProcessor) -> None:
    started = await _started(front)
    assert started.output == processor_pb2.CHAT_OUTPUT_EVENTS
    assert started.prompt_tokens == len("user:hi|<think>")
    assert (started.sampling.top_p, started.sampling.max_new_tokens) == (0.5, 3)
    assert not started.reasoning_set


async def test_an_answer_of_text_alone_is_not(text_model: TextModel) -> None:
    async with worker() as one, processor({MODEL: text_model}, [one.address]) as front:
        started = await _started(front)
    assert started.output == processor_pb2.CHAT_OUTPUT_TEXT


async def test_with_tools_it_needs_a_format(text_model: TextModel) -> None:
    async with worker() as one, processor({MODEL: text_model}, [one.address]) as front:
        start = processor_pb2.ChatStart(messages=[message("hi")], tools=[TOOL], output=WHERE_NEEDED)
        call = front.stub.ChatOnce(processor_pb2.ChatOnceRequest(start=start))
        refused = await refusal(call)
    assert refused.fields == ("start.output",)


@pytest.mark.parametrize(
    ("asked", "is_set"),
    [
        (REASONING(enabled=False, if_supported=True), True),
        (REASONING(effort="high", if_supported=True), False),  # its template has no efforts
    ],
)
async def test_switches_are_left_out_where_there_are_none(
    front: InProcessProcessor, asked: processor_pb2.ReasoningOptions, *, is_set: bool
) -> None:
    started = await _started(front, reasoning=asked)
    assert started.reasoning_set is is_set
    assert started.prompt_tokens == len("user:hi|" + "no " * is_set + "<think>")


async def test_the_start_is_short_unless_it_is_asked_for(front: InProcessProcessor) -> None:
    answer = await chat(front.stub, "hi", opts=options(1))
    assert answer.started is not None
    assert not answer.started.prompt_tokens
    assert not answer.started.HasField("sampling")


async def test_a_conversation_is_tokenized_as_its_reasoning_says(
    front: InProcessProcessor,
) -> None:
    request = processor_pb2.TokenizeRequest(return_token_bytes=True)
    request.conversation.messages.add().CopyFrom(message("hi"))
    request.conversation.reasoning.enabled = False
    response = await front.stub.Tokenize(request)
    assert response.rendered_prompt == "user:hi|no <think>"
    assert b"".join(response.token_bytes) == response.rendered_prompt.encode()
    assert len(response.token_bytes) == len(response.token_ids)
    assert response.context_length == 2048
