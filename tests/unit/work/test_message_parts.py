"""The parts of a message are counted as the library reads them, before it does."""

from __future__ import annotations

from typing import Any

import pytest

from millstream.v1 import chat_pb2, processor_pb2
from millstream_server.runtime.errors import InvalidRequestError
from millstream_server.runtime.rpc.message_parts import MAX_PARTS, _count, check_parts
from millstream_server.runtime.work.fair_queue import PoolLimits
from millstream_server.runtime.work.pool import WorkPool

USER = chat_pb2.CHAT_ROLE_USER
KIND = processor_pb2.ChatRequest.DESCRIPTOR
CALL = chat_pb2.ToolCall(id="c", name="f", arguments_json="{}")


def conversation(*messages: chat_pb2.ChatMessage) -> bytes:
    start = processor_pb2.ChatStart(messages=messages)
    return processor_pb2.ChatRequest(start=start).SerializeToString()


def counted(data: bytes, kind: Any = KIND) -> int | None:
    return _count(data, kind, len(data))


def test_texts_and_messages_are_counted_at_every_depth() -> None:
    message = chat_pb2.ChatMessage(
        role=chat_pb2.CHAT_ROLE_USER, tool_calls=[CALL] * 3, name="x" * 300
    )
    assert counted(conversation(message, chat_pb2.ChatMessage())) == 1 + 2 + 1 + 3 * 4


@pytest.mark.parametrize(
    "data",
    [
        processor_pb2.DetokenizeRequest(token_ids=[1 << 31] * 1000).SerializeToString(),
        b"\x10\x01" * 1000 + b"\x12\x01\x01",
        b"\x0d1234" * 1000 + b"\x09" + b"1" * 8 + b"\x12\x01\x01",
    ],
    ids=["packed", "one by one", "fixed"],
)
def test_numbers_are_no_parts(data: bytes) -> None:
    assert counted(data, processor_pb2.DetokenizeRequest.DESCRIPTOR) == 1


@pytest.mark.parametrize(
    "data",
    [b"\x0a", b"\x0a\xff", b"\x0a\x05\x0a", b"\x10" + b"\xff" * 100_000, b"\x0a\x80\x80\x04", b""],
)
def test_what_is_no_message_ends_the_count(data: bytes) -> None:
    assert counted(data) in {0, 1, 2}


@pytest.mark.parametrize(
    "data",
    [
        conversation(*[chat_pb2.ChatMessage()] * (MAX_PARTS + 1)),
        conversation(chat_pb2.ChatMessage(tool_calls=[CALL] * (MAX_PARTS // 4 + 1))),
        b"\x7b\x7c" * MAX_PARTS,
    ],
    ids=["empty messages", "calls", "groups"],
)
async def test_too_many_parts(data: bytes) -> None:
    pool = WorkPool(PoolLimits())
    with pytest.raises(InvalidRequestError, match=f"more than {MAX_PARTS} texts and messages"):
        await check_parts(data, KIND, pool)
    pool.close()


async def test_the_longest_conversation_has_fewer() -> None:
    pool = WorkPool(PoolLimits())
    messages = [
        chat_pb2.ChatMessage(role=chat_pb2.CHAT_ROLE_ASSISTANT, tool_calls=[CALL] * 4)
    ] * 4096
    await check_parts(conversation(*messages), KIND, pool)
    pool.close()
