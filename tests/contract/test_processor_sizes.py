"""What is small on the wire and huge once read is refused before anything is made of it."""

from __future__ import annotations

import grpc
import pytest

from millstream.v1 import chat_pb2, processor_pb2
from millstream_server.processor.convert import MAX_MESSAGES, MAX_PARTS, MAX_TOOLS
from millstream_server.processor.text.tokenizer import TextModel
from millstream_server.runtime.rpc.message_parts import MAX_PARTS as MAX_PARTS_OF_ALL
from millstream_testing.in_process import suite
from tests.support.wire.failures import refusal

EMPTY = chat_pb2.ChatMessage()
CROWDED = chat_pb2.ChatMessage(content=[chat_pb2.ContentPart()] * (MAX_PARTS + 1))


@pytest.mark.parametrize(
    ("start", "field"),
    [
        (processor_pb2.ChatStart(messages=[EMPTY] * (MAX_MESSAGES + 1)), "start.messages"),
        (processor_pb2.ChatStart(messages=[CROWDED]), "start.messages"),
        (processor_pb2.ChatStart(tools=[chat_pb2.ChatTool()] * (MAX_TOOLS + 1)), "start.tools"),
    ],
    ids=["messages", "parts", "tools"],
)
async def test_a_chat_of_too_many_parts(
    text_model: TextModel, start: processor_pb2.ChatStart, field: str
) -> None:
    async with suite(text_model) as (front, _):
        call = front.stub.Chat()
        await call.write(processor_pb2.ChatRequest(start=start))
        refused = await refusal(call)
    assert refused.code is grpc.StatusCode.INVALID_ARGUMENT
    assert refused.fields == (field,)
    assert "at most" in refused.message


async def test_tokenize_too(text_model: TextModel) -> None:
    async with suite(text_model) as (front, _):
        conversation = processor_pb2.Conversation(messages=[CROWDED])
        refused = await refusal(
            front.stub.Tokenize(processor_pb2.TokenizeRequest(conversation=conversation))
        )
        assert refused.fields == ("conversation.messages",)


async def test_a_message_of_too_many_parts_is_refused_before_it_is_parsed(
    text_model: TextModel,
) -> None:
    start = processor_pb2.ChatStart(messages=[EMPTY] * (MAX_PARTS_OF_ALL + 1))
    async with suite(text_model) as (front, _):
        call = front.stub.Chat()
        await call.write(processor_pb2.ChatRequest(start=start))
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await call.read()
    assert failed.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert failed.value.details() == (
        f"the message has more than {MAX_PARTS_OF_ALL} texts and messages"
    )
