"""HTTP/2 requests that aren't gRPC, beside RPCs on one connection."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import pytest_asyncio

from millstream_server.runtime.errors import InternalError
from millstream_testing.waiting import until
from tests.support.wire.http_service import OPTIONS, HttpService, http_service
from tests.support.wire.raw_http2 import (
    Kind,
    Rpc,
    Setting,
    Wire,
    connected,
    request_fields,
    settings,
    window_update,
)


@pytest_asyncio.fixture
async def service() -> AsyncIterator[HttpService]:
    async with http_service() as served:
        yield served


@pytest_asyncio.fixture
async def wire(service: HttpService) -> AsyncIterator[Wire]:
    async with connected(service.port) as opened:
        yield opened


def ask(wire: Wire, path: str, body: bytes = b"") -> Rpc:
    rpc = wire.rpc(fields=request_fields(path, content_type="application/json", te=None))
    rpc.send_raw(body, end=True)
    return rpc


async def received(rpc: Rpc) -> bytes:
    await rpc.wire.until(lambda: rpc.over)
    return rpc.received


async def test_a_body_is_answered_whole(service: HttpService, wire: Wire) -> None:
    for body in (b"", b"abc", bytes(16_000)):
        rpc = ask(wire, "/echo?x=y", body)
        headers = await rpc.headers()
        assert (headers[":status"], headers["content-type"]) == ("200", "application/json")
        assert await received(rpc) == b"got %d" % len(body)
    assert service.bodies[1] == b"abc"


async def test_events_come_as_the_window_allows(service: HttpService, wire: Wire) -> None:
    service.pieces = [b"%d" % i * 30_000 for i in range(6)]
    rpc = ask(wire, "/events")
    await wire.until(lambda: len(rpc.received) == 65_535)
    wire.send(window_update(rpc.stream, 200_000), window_update(0, 200_000))
    await wire.until(lambda: rpc.over)
    assert rpc.received == b"".join(b"%d" % i * 30_000 for i in range(6))


async def test_failures_have_a_status_or_are_an_event(service: HttpService, wire: Wire) -> None:
    rpc = ask(wire, "/busy")
    headers = await rpc.headers()
    assert (headers[":status"], headers["retry-after"]) == ("429", "3")
    service.pieces = [b"data: 1\n\n", InternalError("oh")]
    rpc = ask(wire, "/events")
    assert await received(rpc) == b"data: 1\n\ndata: oh\n\n"
    service.pieces = [b"{", InternalError("oh")]
    rpc = ask(wire, "/whole")
    assert (await wire.first(Kind.RST_STREAM, rpc.stream)) is not None


@pytest.mark.parametrize("path", ["/none", "/v1/none"])
async def test_what_is_not_there_is_404(wire: Wire, path: str) -> None:
    rpc = ask(wire, path)
    assert (await rpc.headers())[":status"] == "404"
    assert b"it serves /busy, /echo" in await received(rpc)


async def test_a_window_too_small_for_a_refusal_has_its_head(wire: Wire) -> None:
    wire.send(settings({Setting.INITIAL_WINDOW_SIZE: 10}))
    rpc = ask(wire, "/none")
    headers = await rpc.headers()
    assert (headers[":status"], "content-length" in headers) == ("404", False)
    assert await received(rpc) == b""
    assert not wire.of(Kind.RST_STREAM, rpc.stream)


async def test_a_reset_cancels(service: HttpService, wire: Wire) -> None:
    rpc = ask(wire, "/hang")
    await until(lambda: service.waiting == 1)
    rpc.reset()
    await until(lambda: service.cancelled == 1)


async def test_a_body_that_is_too_large_is_413() -> None:
    options = replace(OPTIONS, max_receive_bytes=20_000)
    async with http_service(options) as service, connected(service.port) as wire:
        rpc = wire.rpc(fields=request_fields("/echo", content_type="application/json", te=None))
        rpc.send_raw(bytes(16_000))
        rpc.send_raw(bytes(16_000))
        assert (await rpc.headers())[":status"] == "413"
