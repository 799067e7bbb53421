"""A listener of the HTTP/2 transport, with a stand-in for HTTP/2 behind it, and its callers."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

from grpc_health.v1 import health_pb2_grpc

from millstream_server.runtime.rpc.health import Health, HealthServicer
from millstream_server.runtime.rpc.ledger import Place
from millstream_server.runtime.rpc.serving import Rpcs
from millstream_server.runtime.security.tls import ServerTls
from millstream_server.runtime.transport.http1 import Http1Connection
from millstream_server.runtime.transport.listener import Listener
from millstream_server.runtime.transport.options import TransportOptions
from millstream_server.runtime.transport.server import H2Server
from tests.support.wire.certificates import SecretMount

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
OPTIONS = TransportOptions(max_receive_bytes=1 << 20)
HEALTH = Health({"": True, "liveness": True, "a.Service": False}, ["port failed"])


class Http2(asyncio.Protocol):
    """Echoes what it is sent, and is used from the first byte on."""

    def __init__(self, place: Place) -> None:
        self.place = place
        place.mark_used()

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.place.give_up = transport.abort

    def data_received(self, data: bytes) -> None:
        self.transport.write(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self.place.free()


class Listens:
    """A listener, what it made and where it is."""

    def __init__(self, listener: Listener, server: H2Server, made: list[Http2], port: int) -> None:
        self.listener = listener
        self.server = server
        """Of the connections of HTTP/1.1."""
        self.made = made
        self.port = port

    async def connect(self, tls: ssl.SSLContext | None = None) -> Any:
        return await asyncio.open_connection("127.0.0.1", self.port, ssl=tls)


@contextlib.asynccontextmanager
async def listening(
    options: TransportOptions = OPTIONS, tls: ServerTls | None = None, on: str = "127.0.0.1:0"
) -> AsyncIterator[Listens]:
    made: list[Http2] = []

    def speak(place: Place) -> Http2:
        made.append(Http2(place))
        return made[-1]

    server = H2Server(Rpcs(), options, lambda: HEALTH)
    listener = Listener(speak, partial(Http1Connection, server), options)
    port = listener.bind(on, tls)
    listener.start()
    try:
        yield Listens(listener, server, made, port)
    finally:
        listener.close(at_once=True)
        for each in made:
            each.transport.abort()
        for connection in list(server.connections):
            connection.abort()
        await asyncio.wait_for(listener.closed(), 5)


async def exchange(connection: Any, sent: bytes) -> bytes:
    """Send bytes; return all that comes until the server closes."""
    reader, writer = connection
    writer.write(sent)
    answer: bytes = await asyncio.wait_for(reader.read(), 5)
    writer.close()
    return answer


def parsed(answer: bytes) -> tuple[int, dict[str, str], str]:
    head, _, body = answer.decode().partition("\r\n\r\n")
    first, *lines = head.split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines)
    return int(first.split()[1]), headers, body


def get(path: str, *, method: str = "GET", headers: str = "") -> bytes:
    return f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n{headers}\r\n".encode()


async def closes(connection: Any) -> None:
    with contextlib.suppress(ConnectionResetError):
        assert await asyncio.wait_for(connection[0].read(), 5) == b""
    connection[1].close()


@contextlib.asynccontextmanager
async def serving_health(on: str) -> AsyncIterator[int]:
    health = HealthServicer(["a.Service"], lambda: ["port failed"])
    server = H2Server(Rpcs(), OPTIONS, lambda: health.told)
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    port = server.bind(on)
    await server.start()
    try:
        yield port
    finally:
        health.close()
        await server.stop(None)


def trusting(mount: SecretMount, *alpn: str) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(mount.ca))
    if alpn:
        context.set_alpn_protocols(list(alpn))
    return context
