"""What is small on the wire and huge once read is refused before anything is made of it."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import grpc
import pytest

from millstream.v1 import chat_pb2, processor_pb2
from millstream_server.processor import convert
from millstream_server.processor.convert import MAX_TOOLS
from millstream_server.processor.http import anthropic_requests, requests
from millstream_server.processor.http.responses import input as responses_input
from millstream_server.processor.text.messages import MAX_MESSAGES, MAX_PARTS, ChatMessage
from millstream_server.processor.text.tokenizer import TextModel
from millstream_server.runtime.rpc.message_parts import MAX_PARTS as MAX_PARTS_OF_ALL
from millstream_testing.in_process import suite
from millstream_testing.waiting import until
from tests.support.clients.http_api import ask
from tests.support.wire.failures import refusal

TEXTS = [{"type": "text", "text": ""}] * MAX_PARTS
SAID = [{"role": "user", "content": TEXTS}]
BODIES: dict[str, dict[str, object]] = {
    "/v1/chat/completions": {"messages": SAID},
    "/v1/chat/completions/render": {"messages": SAID},
    "/tokenize": {"messages": SAID},
    "/v1/messages": {"max_tokens": 1, "messages": SAID},
    "/v1/messages/count_tokens": {"messages": SAID},
    "/v1/responses": {"input": [{"role": "user", "content": TEXTS}]},
}
FULL = chat_pb2.ChatMessage(
    role=chat_pb2.CHAT_ROLE_USER, content=[chat_pb2.ContentPart(text="")] * MAX_PARTS
)
START = processor_pb2.ChatStart(messages=[FULL])
TOLD = processor_pb2.Conversation(messages=[FULL])
TURN = processor_pb2.UserTurn(content=FULL.content)
RESULT = chat_pb2.ChatMessage(role=chat_pb2.CHAT_ROLE_TOOL, tool_call_id="c", content=FULL.content)
RESULTS = processor_pb2.ToolResults(messages=[RESULT])
FIRST = processor_pb2.ChatRequest(
    start=processor_pb2.ChatStart(
        messages=[
            chat_pb2.ChatMessage(
                role=chat_pb2.CHAT_ROLE_USER, content=[chat_pb2.ContentPart(text="hi")]
            )
        ]
    )
)
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


# ---- what is long is converted in the pool -------------------------------------------------------


@pytest.fixture
def where(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of the threads in which messages are made from now on."""
    names: list[str] = []

    def made(*args: Any, **fields: Any) -> ChatMessage:
        names.append(threading.current_thread().name)
        return ChatMessage(*args, **fields)

    for module in (convert, requests, anthropic_requests, responses_input):
        monkeypatch.setattr(module, "ChatMessage", made)
    return names


@pytest.mark.parametrize("path", BODIES)
async def test_a_long_body_is_converted_in_the_pool(
    text_model: TextModel, where: list[str], path: str
) -> None:
    async with suite(text_model) as (front, _):
        await ask(front.port, path, BODIES[path])
    assert where
    assert {name[:5] for name in where} == {"work-"}


async def test_so_is_a_body_of_many_short_items(text_model: TextModel, where: list[str]) -> None:
    """1,300 calls in 64 KiB take 12 ms."""
    call = {"type": "function_call", "name": "f", "call_id": "c"}
    async with suite(text_model) as (front, _):
        await ask(front.port, "/v1/responses", {"input": [call] * 600})
    assert where
    assert {name[:5] for name in where} == {"work-"}


@pytest.mark.parametrize(
    ("method", "sent"),
    [
        ("ChatOnce", [processor_pb2.ChatOnceRequest(start=START)]),
        ("Render", [processor_pb2.RenderRequest(start=START)]),
        ("Tokenize", [processor_pb2.TokenizeRequest(conversation=TOLD)]),
        ("Chat", [processor_pb2.ChatRequest(start=START)]),
        ("Chat", [FIRST, processor_pb2.ChatRequest(user_turn=TURN)]),
        ("Chat", [FIRST, processor_pb2.ChatRequest(tool_results=RESULTS)]),
    ],
)
async def test_so_is_a_long_message(
    text_model: TextModel, where: list[str], method: str, sent: list[Any]
) -> None:
    async with suite(text_model) as (front, _):
        streams = method.startswith("Chat")
        call = getattr(front.stub, method)(iter(sent) if method == "Chat" else sent[0])
        with contextlib.suppress(grpc.aio.AioRpcError):  # too long for the model
            await (call.read() if streams else call)
        await until(lambda: len(where) >= len(sent))
    assert where[-1].startswith("work-")


async def test_what_is_short_is_converted_at_once(text_model: TextModel, where: list[str]) -> None:
    short = chat_pb2.ChatMessage(role=chat_pb2.CHAT_ROLE_USER, content=FULL.content[:1000])
    start = processor_pb2.ChatStart(messages=[short])
    async with suite(text_model) as (front, _):
        await front.stub.Render(processor_pb2.RenderRequest(start=start))
        await ask(front.port, "/tokenize", {"messages": [{"role": "user", "content": "hi"}]})
    assert where == ["MainThread"] * 2
