"""A server of a few HTTP endpoints on the public port's transport."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from millstream_server.runtime.errors import Failure, OverloadedError
from millstream_server.runtime.rpc.call import Layer
from millstream_server.runtime.rpc.health import Health
from millstream_server.runtime.rpc.http import (
    EVENTS,
    Endpoint,
    Endpoints,
    HttpCall,
    Refusal,
    retry_after,
    status_of,
)
from millstream_server.runtime.rpc.serving import Rpcs
from millstream_server.runtime.security.tls import ServerTls
from millstream_server.runtime.transport.options import TransportOptions
from millstream_server.runtime.transport.server import H2Server

OPTIONS = TransportOptions(max_receive_bytes=1 << 20)


class Pieces:
    """A source of given pieces, one per pull; an exception among them is raised."""

    gathers = False

    def __init__(self, call: HttpCall, pieces: Sequence[bytes | Exception]) -> None:
        self._call = call
        self._left = list(pieces)

    @property
    def over(self) -> bool:
        return not self._left

    def next(self) -> bytes:
        piece = self._left.pop(0)
        if isinstance(piece, Exception):
            raise piece
        if self._left:
            self._call.ready()
        return piece


@dataclass
class HttpService:
    """The endpoints; ``pieces`` are what /pieces sends."""

    server: H2Server
    port: int = 0
    pieces: list[bytes | Exception] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    cancelled: int = 0
    waiting: int = 0

    async def echo(self, body: bytes, call: HttpCall) -> None:
        self.bodies.append(body)
        await call.write(b"got %d" % len(body))

    async def events(self, _body: bytes, call: HttpCall) -> None:
        call.respond(EVENTS)
        call.ready()
        await call.send_from(Pieces(call, self.pieces))

    async def whole(self, _body: bytes, call: HttpCall) -> None:
        call.ready()
        await call.send_from(Pieces(call, self.pieces))

    async def hang(self, _body: bytes, call: HttpCall) -> None:
        self.waiting += 1
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    async def busy(self, _body: bytes, call: HttpCall) -> None:
        raise OverloadedError("too much", retry_delay_s=2.5)


def say(failure: Failure) -> Refusal:
    return Refusal(
        status=status_of(failure),
        body=failure.message.encode(),
        headers=retry_after(failure),
        content_type="text/plain",
        event=b"data: " + failure.message.encode() + b"\n\n",
    )


@contextlib.asynccontextmanager
async def http_service(
    options: TransportOptions = OPTIONS,
    layers: Sequence[Layer] = (),
    tls: ServerTls | None = None,
) -> AsyncIterator[HttpService]:
    rpcs = Rpcs(layers)
    server = H2Server(rpcs, options, lambda: Health({"": True, "liveness": True}))
    service = HttpService(server)
    endpoints = [
        Endpoint("POST", f"/{serve.__name__}", serve, say)
        for serve in (service.echo, service.events, service.whole, service.hang, service.busy)
    ]
    server.endpoints = Endpoints(rpcs, endpoints, say)
    service.port = server.bind("127.0.0.1:0", tls)
    await server.start()
    try:
        yield service
    finally:
        async with asyncio.timeout(30):  # a connection that is never forgotten would hold it
            await server.stop(None)


def post(path: str, body: bytes = b"", *, headers: str = "", version: str = "1.1") -> bytes:
    first = f"POST {path} HTTP/{version}\r\nHost: localhost\r\n"
    return f"{first}Content-Length: {len(body)}\r\n{headers}\r\n".encode() + body


class Raw:
    """A connection of HTTP/1.1."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def response(self, *, bare: bool = False) -> tuple[int, dict[str, str], list[bytes]]:
        """Read one: status, headers, and its body, in its chunks if it has any."""
        async with asyncio.timeout(5):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            first, *lines = head[:-4].split("\r\n")
            headers = {k.lower(): v for k, v in (line.split(": ", 1) for line in lines)}
            return int(first.split()[1]), headers, [] if bare else await self._body(headers)

    async def _body(self, headers: dict[str, str]) -> list[bytes]:
        if "content-length" in headers:
            return [await self.reader.readexactly(int(headers["content-length"]))]
        if "transfer-encoding" not in headers:
            return [await self.reader.read()]
        chunks = []
        while size := int(await self.reader.readline(), 16):
            chunks.append(await self.reader.readexactly(size))
            assert await self.reader.readexactly(2) == b"\r\n"
        assert await self.reader.readexactly(2) == b"\r\n"
        return chunks

    async def closed(self) -> bool:
        """Whether nothing comes before the server closes."""
        async with asyncio.timeout(5):
            with contextlib.suppress(ConnectionResetError):
                return await self.reader.read() == b""
        return True


@contextlib.asynccontextmanager
async def raw(port: int, **options: Any) -> AsyncIterator[Raw]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, **options)
    try:
        yield Raw(reader, writer)
    finally:
        writer.close()
