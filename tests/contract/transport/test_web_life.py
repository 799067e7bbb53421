"""gRPC-web and Connect: deadlines, callers that leave, bounds, and pages of other sites."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
from collections.abc import AsyncIterator
from dataclasses import replace

import httpx
import pytest

from millstream_server.runtime.transport.web_stream import WebStream
from millstream_server.runtime.work.pool import WorkPool
from millstream_testing.waiting import until
from tests.support.wire.http_service import http_service, post, raw
from tests.support.wire.raw_http2 import connected, request_fields
from tests.support.wire.web_service import (
    CONNECT,
    CONNECT_JSON,
    JSON,
    OPTIONS,
    PROTO,
    STREAM,
    UNARY,
    WEB,
    Version,
    WebService,
    asked,
    call,
    caller,
    frame,
    frames,
    texts,
    trailers,
    web_service,
)

# ---- cancel and deadline -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "content_type", "body"),
    [
        (UNARY, JSON, b'{"text": "hang"}'),
        (STREAM, CONNECT, frame(asked("hang"))),
        (STREAM, WEB, frame(asked("hang"))),
    ],
)
async def test_a_deadline_ends_the_handler(
    service: WebService, client: httpx.AsyncClient, path: str, content_type: str, body: bytes
) -> None:
    name = "grpc_timeout" if content_type == WEB else "connect_timeout_ms"
    within = "50m" if content_type == WEB else "50"
    got = await call(client, path, content_type, body, **{name: within})
    await until(lambda: service.cancelled == 1)
    if content_type == WEB:
        assert trailers(frames(got.content)[0][1])["grpc-status"] == "4"
    else:
        assert b"deadline_exceeded" in got.content
    assert got.status_code == (504 if path == UNARY else 200)


async def test_a_caller_that_leaves_cancels_its_rpc(service: WebService) -> None:
    body = frame(asked("hang"))
    async with raw(service.port) as http1:
        http1.send(post(STREAM, body, headers=f"Content-Type: {CONNECT}\r\n"))
        await until(lambda: service.waiting == 1)
    await until(lambda: service.cancelled == 1)
    async with connected(service.port) as wire:
        rpc = wire.rpc(fields=request_fields(STREAM, content_type=WEB, te=None))
        rpc.send_raw(body, end=True)
        await until(lambda: service.waiting == 2)
        rpc.reset()
        await until(lambda: service.cancelled == 2)


async def test_who_reads_slowly_on_http_1_1_gets_large_messages_too(service: WebService) -> None:
    async with raw(service.port) as wire:
        wire.reader._limit = 1  # type: ignore[attr-defined]  # it reads no further than this
        headers = f"Content-Type: {CONNECT}\r\n"
        wire.send(post(STREAM, frame(asked("3900000 3900000")), headers=headers))
        await until(lambda: service.server.bounds.unsent.used > 1 << 20)
        wire.reader._limit = 1 << 16  # type: ignore[attr-defined]
        status, _, chunks = await wire.response()
    *messages, (flags, _) = frames(b"".join(chunks))
    assert (status, flags) == (200, 2)
    assert [len(text) for text in texts([m for _, m in messages])] == [3_900_000] * 2


@pytest.mark.parametrize(
    ("path", "content_type", "body"),
    [
        (UNARY, JSON, b'{"text": "abc"}'),
        (UNARY, PROTO, b""),
        (UNARY, JSON, b'{"text": "bad"}'),
        (STREAM, CONNECT_JSON, frame(b'{"text": "one"}')),
        (STREAM, WEB, frame(asked("one"))),
    ],
)
async def test_what_a_call_held_is_free_when_it_ends(
    client: httpx.AsyncClient, path: str, content_type: str, body: bytes
) -> None:
    await call(client, path, content_type, body)
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            await call(client, path, content_type, body)
        assert [each for each in gc.get_objects() if WebStream in type(each).__mro__] == []
    finally:
        gc.enable()


async def test_http_1_0_and_a_pipeline(service: WebService) -> None:
    head = "Content-Type: application/json\r\n"
    request = post(UNARY, b'{"text": "abc"}', headers=head)
    async with raw(service.port) as wire:
        wire.send(request * 2)
        assert [(await wire.response())[2] for _ in range(2)] == [[b'{"tokenIds": [0, 1, 2]}']] * 2
    async with raw(service.port) as wire:
        body = frame(asked("one two"))
        wire.send(post(STREAM, body, headers=f"Content-Type: {WEB}\r\n", version="1.0"))
        status, headers, (got,) = await wire.response()
        assert (status, headers["connection"], len(frames(got))) == (200, "close", 3)


async def test_json_that_waits_to_be_converted_is_counted_and_may_be_shed(
    version: Version,
) -> None:
    busy, body = threading.Event(), b'{"text": "ab"' + b" " * 900_000 + b"}"
    options = replace(OPTIONS, max_received_bytes=1500 << 10)
    async with (
        web_service(options) as service,
        caller(service.port, version) as client,
        caller(service.port, version) as other,
        occupied(service.server.pool, busy),
    ):
        first = asyncio.ensure_future(call(client, UNARY, JSON, body))
        received = service.server.bounds.received
        await until(lambda: received.used > 900_000)
        second = asyncio.ensure_future(call(other, UNARY, JSON, body))
        done, _ = await asyncio.wait([first, second], return_when=asyncio.FIRST_COMPLETED)
        shed = done.pop().result()
        assert (shed.status_code, shed.json()["code"]) == (429, "resource_exhausted")
        busy.set()
        codes = [each.status_code for each in await asyncio.gather(first, second)]
        assert sorted(codes) == [200, 429]
        assert received.used == 0


async def test_long_json_holds_up_no_short_json(service: WebService, version: Version) -> None:
    busy, pool = threading.Event(), service.server.pool
    short = b'{"conversation": {"messages": [' + b"{}," * 300 + b"{}]}}"
    async with (
        caller(service.port, version) as client,
        caller(service.port, version) as other,
        occupied(pool, busy),
    ):
        body = b'{"text": "ab"' + b" " * 900_000 + b"}"
        long = [asyncio.ensure_future(call(client, UNARY, JSON, body)) for _ in range(5)]
        await until(lambda: pool.waiting_s > 5 * 0.05)
        assert (await call(other, UNARY, JSON, short)).status_code == 200
        assert not any(each.done() for each in long)
        busy.set()
        assert {each.status_code for each in await asyncio.gather(*long)} == {200}


@contextlib.asynccontextmanager
async def occupied(pool: WorkPool, until_set: threading.Event) -> AsyncIterator[None]:
    """Let long work that waits for an event be all that the pool does of its kind."""
    work = asyncio.ensure_future(pool.run(until_set.wait, 1.0))
    try:
        yield
    finally:
        until_set.set()
        await work


# ---- other sites' pages --------------------------------------------------------------------------

PAGE = "https://app.example"


@pytest.mark.parametrize(("origins", "said"), [({PAGE}, PAGE), ({"*"}, "*")])
async def test_pages_that_are_allowed_may_ask_and_read(
    version: Version, origins: set[str], said: str
) -> None:
    options = replace(OPTIONS, cors_origins=origins)
    async with web_service(options) as service, caller(service.port, version) as client:
        asking = {
            "origin": PAGE,
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization,content-type",
        }
        got = (await client.options(UNARY, headers=asking)).headers
        assert got["access-control-allow-origin"] == said
        assert got["access-control-allow-methods"] == "POST"
        assert got["access-control-allow-headers"] == "authorization,content-type"
        for path, content_type, body in (
            (UNARY, JSON, b'{"text": "abc"}'),
            (UNARY, JSON, b'{"text": "bad"}'),
            (STREAM, WEB, frame(asked("one"))),
        ):
            answer = await call(client, path, content_type, body, origin=PAGE)
            assert answer.headers["access-control-allow-origin"] == said
            assert answer.headers["access-control-expose-headers"] == "*"


@pytest.mark.parametrize("origins", [set(), {"https://other.example"}])
async def test_other_pages_are_told_nothing(version: Version, origins: set[str]) -> None:
    options = replace(OPTIONS, cors_origins=origins)
    async with web_service(options) as service, caller(service.port, version) as client:
        asking = {"origin": PAGE, "access-control-request-method": "POST"}
        asked_first = await client.options(UNARY, headers=asking)
        answer = await call(client, UNARY, JSON, b'{"text": "abc"}', origin=PAGE)
        for got in (asked_first, answer):
            assert not [name for name in got.headers if name.startswith("access-control")]


async def test_the_other_apis_of_the_port_are_for_the_same_pages(version: Version) -> None:
    options = replace(OPTIONS, cors_origins={PAGE})
    async with http_service(options) as service, caller(service.port, version) as client:
        service.pieces = [b"data: 1\n\n", b"data: 2\n\n"]
        for path, status in (("/echo", 200), ("/events", 200), ("/busy", 429), ("/none", 404)):
            got = await client.post(path, content=b"abc", headers={"origin": PAGE})
            assert got.status_code == status
            assert got.headers["access-control-allow-origin"] == PAGE
