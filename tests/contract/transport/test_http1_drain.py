"""The end of connections of HTTP/1.1 in a drain: whoever wasn't told of it is served."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from millstream_server.runtime.errors import OverloadedError
from millstream_server.runtime.transport import http1, listener
from millstream_testing.waiting import until
from tests.support.wire.http_service import HttpService, Raw, http_service, post, raw
from tests.support.wire.raw_http2 import PREFACE, goaway, settings

LAST_STREAM = (1 << 31) - 1


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no busy machine end what a test is about to use."""
    for module, name in ((http1, "_LEAVING_IDLE_S"), (http1, "_LINGER_S"), (listener, "_LATE_S")):
        monkeypatch.setattr(module, name, 60.0)


@pytest_asyncio.fixture
async def service() -> AsyncIterator[HttpService]:
    async with http_service() as served:
        yield served


async def told(wire: Raw, body: bytes) -> bool:
    """Read a response of /echo; return whether it says that the connection closes."""
    status, headers, (said,) = await wire.response()
    assert (status, said) == (200, b"got %d" % len(body))
    return headers.get("connection") == "close"


async def kept(service: HttpService, wire: Raw) -> None:
    """Bring a request, so that the connection is one that stays open."""
    wire.send(post("/echo", b"first"))
    assert not await told(wire, b"first")
    await until(lambda: not any(each.streams for each in service.server.connections))


async def test_from_its_announcement_on_responses_say_that_the_connection_closes(
    service: HttpService, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with raw(service.port) as old, raw(service.port) as idle:
        await kept(service, old)
        await kept(service, idle)
        service.server.leaving = True
        old.send(post("/echo", b"abc"))
        assert await told(old, b"abc")
        assert await old.closed()
        async with raw(service.port) as new:
            new.send(post("/none"))
            assert (await new.response())[1]["connection"] == "close"
            assert await new.closed()
        monkeypatch.setattr(http1, "_LEAVING_IDLE_S", 0.0)
        await service.server.stop_accepting()
        assert await idle.closed()


async def test_what_was_sent_before_its_caller_could_know_is_served(service: HttpService) -> None:
    """On a kept connection, on one that isn't accepted yet, and on one that has said nothing."""
    async with raw(service.port) as old, raw(service.port) as silent:
        await kept(service, old)
        await until(lambda: service.server._listener._places.used == 2)
        old.send(post("/echo", b"old"))  # in the server's socket, unread
        with socket.create_connection(("127.0.0.1", service.port)) as fresh:
            fresh.sendall(post("/echo", b"fresh"))  # the kernel has accepted it alone
            draining = asyncio.ensure_future(service.server.stop_accepting())
            await asyncio.sleep(0)
            assert await told(old, b"old")
            silent.send(post("/echo", b"silent"))
            assert await told(silent, b"silent")
            reader, writer = await asyncio.open_connection(sock=fresh)
            assert await told(Raw(reader, writer), b"fresh")
            assert await old.closed()
            await draining
            writer.close()
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", service.port)
    assert sorted(service.bodies) == [b"first", b"fresh", b"old", b"silent"]


async def test_behind_a_response_that_had_begun_one_more_request_is_served(
    service: HttpService,
) -> None:
    service.pieces = [bytes(100_000)] * 100
    async with raw(service.port, limit=1 << 16) as wire:
        wire.send(post("/events"))
        await until(lambda: any(each.stuck_bytes for each in service.server.connections))
        draining = asyncio.ensure_future(service.server.stop_accepting())
        _, headers, chunks = await wire.response()
        assert ("connection" in headers, len(chunks)) == (False, 100)
        assert not draining.done()
        wire.send(post("/echo", b"abc"))
        assert await told(wire, b"abc")
        await draining
        assert await wire.closed()


async def test_a_request_that_is_served_says_so_at_its_end(service: HttpService) -> None:
    async with raw(service.port) as wire:
        wire.send(post("/hang") + post("/echo", b"behind"))
        await until(lambda: service.waiting == 1)
        draining = asyncio.ensure_future(service.server.stop_accepting())
        await asyncio.sleep(0)
        (connection,) = service.server.connections
        (stream,) = connection.streams.values()
        stream.fail(OverloadedError("over"))
        status, headers, _ = await wire.response()
        assert (status, headers["connection"]) == (429, "close")
        assert await wire.closed()  # in good order, though something is unread
        await draining
    assert service.bodies == []


async def test_what_is_still_sent_behind_the_last_response_resets_nothing(
    service: HttpService,
) -> None:
    """A lingering close, RFC 9112, 9.6."""
    service.server.leaving = True
    async with raw(service.port) as wire:
        wire.send(post("/echo", b"abc"))
        await until(lambda: bool(service.bodies))
        (connection,) = service.server.connections
        await until(lambda: connection.takes_no_more)
        wire.send(bytes(100_000))
        assert await told(wire, b"abc")
        assert await wire.reader.read() == b""


async def test_a_new_connection_of_http2_learns_of_the_drain(service: HttpService) -> None:
    async with raw(service.port) as silent:
        await until(lambda: service.server._listener._places.used == 1)
        draining = asyncio.ensure_future(service.server.stop_accepting())
        await asyncio.sleep(0)
        silent.send(PREFACE + settings())
        assert goaway(LAST_STREAM) in await silent.reader.readuntil(b"milldrai")
        silent.writer.close()
        await draining


async def test_who_connects_last_and_says_nothing_is_cut(
    service: HttpService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "_LATE_S", 0.05)
    async with raw(service.port) as silent:
        await until(lambda: service.server._listener._places.used == 1)
        await service.server.stop_accepting()
        assert await silent.closed()


async def test_a_stop_waits_for_no_idle_connection(service: HttpService) -> None:
    async with raw(service.port) as idle:
        await kept(service, idle)
        stopping = asyncio.ensure_future(service.server.stop(60))
        assert await idle.closed()
        idle.writer.close()
        async with asyncio.timeout(30):
            await stopping
