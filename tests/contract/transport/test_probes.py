"""What an HTTP request is answered, and how a connection's first bytes decide."""

from __future__ import annotations

import asyncio
import contextlib
import json
from dataclasses import replace
from typing import Any

import pytest

from millstream_server.runtime.rpc.serving import Rpcs
from millstream_server.runtime.transport.server import H2Server
from millstream_testing.waiting import until
from tests.support.wire.listening import (
    HEALTH,
    OPTIONS,
    PREFACE,
    exchange,
    get,
    listening,
    parsed,
    serving_health,
)
from tests.support.wire.raw_http2 import (
    Setting,
    connected,
    request_fields,
    settings,
    window_update,
)


async def test_the_first_bytes_decide_however_they_are_cut() -> None:
    async with listening() as server:
        reader, writer = await server.connect()
        for part in (PREFACE[:1], PREFACE[1:2], PREFACE[2:]):
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0)
        assert await reader.readexactly(len(PREFACE)) == PREFACE
        writer.close()
        reader, writer = await server.connect()
        writer.write(b"P")
        assert (
            parsed(
                await exchange(
                    (reader, writer),
                    get("/livez")[:0] + b"OST / HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n",
                )
            )[0]
            == 404
        )
    assert len(server.made) == 1


@pytest.mark.parametrize("sent", [b"", b"P", b"GET /livez HTTP/1.1\r\nX: y"])
async def test_who_says_nothing_whole_is_cut(sent: bytes) -> None:
    async with listening(replace(OPTIONS, preface_s=0.05, headers_s=0.05)) as server:
        ticking = asyncio.ensure_future(_ticking(server.server))
        connection = await server.connect()
        with contextlib.suppress(ConnectionResetError):
            assert await exchange(connection, sent) == b""
        ticking.cancel()


async def _ticking(server: H2Server) -> None:
    while True:
        for connection in list(server.connections):
            connection.tick(asyncio.get_running_loop().time())
        await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("path", "status", "says"),
    [
        ("/livez", 200, {"service": "liveness", "status": "SERVING"}),
        ("/readyz", 200, {"service": "", "status": "SERVING"}),
        ("/healthz?verbose", 200, {"service": "", "status": "SERVING"}),
        (
            "/readyz?service=a.Service",
            503,
            {"service": "a.Service", "status": "NOT_SERVING", "conditions": ["port failed"]},
        ),
    ],
)
async def test_a_probe_gets_the_health_of_a_name(path: str, status: int, says: Any) -> None:
    async with listening() as server:
        got, headers, body = parsed(await exchange(await server.connect(), get(path)))
        assert (got, json.loads(body)) == (status, says)
        assert headers["content-length"] == str(len(body))
        assert headers["connection"] == "close"
        head = get(path, method="HEAD")
        assert parsed(await exchange(await server.connect(), head)) == (status, headers, "")


@pytest.mark.parametrize(
    ("request_bytes", "status", "says"),
    [
        (get("/"), 404, "this port serves gRPC, which needs HTTP/2"),
        (get("/readyz?service=none"), 404, "knows no service of that name"),
        (get("/livez", method="POST", headers="Content-Length: 0\r\n"), 405, "this port serves"),
        (
            get(
                "/a.B/C",
                method="POST",
                headers="Content-Type: application/grpc+proto\r\nContent-Length: 100000\r\n",
            )
            + bytes(100_000),
            426,
            "this port serves gRPC",
        ),
        (b"GET /livez HTTP/1.1\r\n\r\n", 400, "isn't HTTP/1.1"),
        (b"PRI /livez HTTP/1.1\r\nHost: x\r\n\r\n", 400, "isn't HTTP/1.1"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400, "isn't HTTP/1.1"),
        (get("/livez", headers="X: " + "y" * 17_000)[:-4], 431, "have more than 16384"),
        (b"GET /livez HTTP/1.0\r\n\r\n", 200, "SERVING"),
        (
            get("/livez", headers="Transfer-Encoding: chunked\r\n") + b"no length\r\n",
            400,
            "isn't HTTP/1.1",
        ),
    ],
)
async def test_whatever_else_is_asked_is_told_what_this_port_is(
    request_bytes: bytes, status: int, says: str
) -> None:
    async with listening() as server:
        got, headers, body = parsed(await exchange(await server.connect(), request_bytes))
    assert got == status
    assert says in body
    if status == 426:
        assert (headers["upgrade"], headers["connection"]) == ("http/2.0", "close, upgrade")


async def test_a_probe_over_http2_may_name_no_host() -> None:
    """As HAProxy's do unless told otherwise."""
    async with serving_health("127.0.0.1:0") as port, connected(port) as wire:
        fields = request_fields("/livez", method="GET", content_type=None, authority=None)
        rpc = wire.rpc(fields=fields, end=True)
        assert (await rpc.headers())[":status"] == "200"


async def test_a_probes_body_waits_for_the_window() -> None:
    """RFC 9113, 5.2."""
    async with serving_health("127.0.0.1:0") as port, connected(port) as wire:
        wire.send(settings({Setting.INITIAL_WINDOW_SIZE: 10}))
        fields = request_fields("/livez", method="GET", content_type=None)
        rpc = wire.rpc(fields=fields, end=True)
        await wire.until(lambda: len(rpc.received) == 10)
        assert not rpc.over
        wire.send(window_update(rpc.stream, 1))
        await wire.until(lambda: len(rpc.received) == 11)
        wire.send(window_update(rpc.stream, 1000))
        await wire.until(lambda: rpc.over)
        assert json.loads(rpc.received) == {"service": "liveness", "status": "SERVING"}


@pytest.mark.parametrize("end", ["reset", "time", "bound"])
async def test_a_probe_whose_body_never_has_room_is_ended(end: str) -> None:
    seconds = 0.05 if end == "time" else 60.0
    server = H2Server(Rpcs(), replace(OPTIONS, first_message_s=seconds), lambda: HEALTH)
    port = server.bind("127.0.0.1:0")
    await server.start()
    try:
        async with connected(port) as wire:
            wire.send(settings({Setting.INITIAL_WINDOW_SIZE: 0}))
            fields = request_fields("/livez", method="GET", content_type=None)
            rpc = wire.rpc(fields=fields, end=True)
            assert (await rpc.headers())[":status"] == "200"
            (connection,) = server.connections
            if end == "reset":
                rpc.reset()
            elif end == "bound":
                server.bounds.streams.shed(connection)
            await until(lambda: not connection.streams)
            assert server.bounds.streams.used == 0
            assert end == "reset" or "reset" in await rpc.end()
    finally:
        await server.stop(None)


@pytest.mark.parametrize(
    ("method", "path", "status", "body"),
    [
        ("GET", "/livez", 200, b'{"service": "liveness", "status": "SERVING"}\n'),
        ("HEAD", "/livez", 200, b""),
        (
            "GET",
            "/readyz?service=a.Service",
            503,
            b'{"service": "a.Service", "status": "NOT_SERVING", "cond',
        ),
        ("GET", "/a.B/C", 404, b"this port serves gRPC"),
    ],
)
async def test_probes_may_speak_http2(method: str, path: str, status: int, body: bytes) -> None:
    """As kubelet's do over TLS, and curl: both offer h2."""
    async with serving_health("127.0.0.1:0") as port, connected(port) as wire:
        rpc = wire.rpc(fields=request_fields(path, method=method, content_type=None), end=True)
        assert (await rpc.headers())[":status"] == str(status)
        await wire.until(lambda: rpc.over)
        assert rpc.received.startswith(body)
        assert bool(rpc.received) is bool(body)
