"""JSON of callers without generated code: counted before it is parsed, stopped when they leave."""

from __future__ import annotations

import asyncio
import threading

import pytest
from google.protobuf import json_format

from millstream.v1.processor_pb2 import DetokenizeRequest, TokenizeRequest
from millstream_server.runtime.errors import InvalidRequestError
from millstream_server.runtime.rpc.json_messages import from_json, parsed
from millstream_server.runtime.rpc.message_parts import MAX_PARTS
from millstream_server.runtime.work.fair_queue import PoolLimits
from millstream_server.runtime.work.pool import WorkPool


def many(part: bytes, count: int) -> bytes:
    return b'{"conversation":{"messages":[' + (part + b",") * (count - 1) + part + b"]}}"


@pytest.mark.parametrize(
    ("part", "count"),
    [(b"{}", MAX_PARTS), (b"[]", MAX_PARTS), (b'{"content":[{"text":"a"}]}', MAX_PARTS // 4)],
)
def test_parts_are_counted_before_they_become_messages(
    part: bytes, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[None] = []
    monkeypatch.setattr(json_format, "ParseDict", lambda *_: begun.append(None))
    with pytest.raises(InvalidRequestError, match=f"more than {MAX_PARTS} objects and fields"):
        from_json(TokenizeRequest, many(part, count))
    assert not begun
    from_json(TokenizeRequest, many(part, count // 2))
    assert begun


def test_the_longest_conversation_is_read() -> None:
    part = b'{"role":"CHAT_ROLE_USER","content":[' + b'{"text":"a"},' * 3 + b'{"text":"a"}]}'
    request = from_json(TokenizeRequest, many(part, 4096))
    assert [len(m.content) for m in request.conversation.messages] == [4] * 4096


async def test_the_parsing_of_a_caller_who_left_stops() -> None:
    pool, begun, left = WorkPool(PoolLimits(threads=1)), threading.Event(), threading.Event()
    request = DetokenizeRequest()

    def kind() -> DetokenizeRequest:
        begun.set()
        left.wait()
        return request

    body = b'{"tokenIds":[' + b"7," * 10_000 + b"7]}"
    call = asyncio.ensure_future(parsed(kind, body, pool))
    await asyncio.to_thread(begun.wait)
    call.cancel()
    await asyncio.wait([call])
    left.set()
    await pool.run(lambda: None, 0.0)  # the one thread is free again
    assert not request.token_ids
    pool.close()


@pytest.mark.parametrize(
    ("body", "thread"),
    [
        (b'{"tokenIds":[' + b"7," * 400 + b"7]}", "MainThread"),
        (b'{"tokenIds":[' + b"7," * 600 + b"7]}", "work-"),
        (b'{"tokenIds":[' + b" " * 20_000 + b"7]}", "MainThread"),
        (b'{"tokenIds":[' + b" " * 40_000 + b"7]}", "work-"),
    ],
)
async def test_the_loop_reads_what_is_short_by_its_parts(body: bytes, thread: str) -> None:
    pool, where = WorkPool(PoolLimits()), []

    def kind() -> DetokenizeRequest:
        where.append(threading.current_thread().name)
        return DetokenizeRequest()

    await parsed(kind, body, pool)
    assert where[0].startswith(thread)
    pool.close()
