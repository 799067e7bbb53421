"""Clients of a Processor's HTTP: a chat after another on HTTP/1.1, many at once on HTTP/2."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import hpack

from tests.benchmarks.hostile import wire
from tests.support.processes.suite import ServiceProcess

PATH = "/v1/chat/completions"
_QUESTION = [{"role": "user", "content": "What is Millstream?"}]
_FIELDS = (
    *((":method", "POST"), (":scheme", "http"), (":path", PATH), (":authority", "processor")),
    ("content-type", "application/json"),
)
_WINDOW_BYTES = 4 << 20
"""Of a stream, as Go's client has it: no chat here needs more credit."""
_HEAD_BYTES = 9
"""Of a frame."""
_ENDED = b""


def _body(tokens: int) -> bytes:
    asked = {"model": "tiny", "messages": _QUESTION, "max_tokens": tokens, "stream": True}
    asked |= {"ignore_eos": True, "stream_options": {"include_usage": True}}
    return json.dumps(asked).encode()


async def _read(began: float, pieces: AsyncIterator[bytes]) -> tuple[float, int, int]:
    """Return the time to the first event, and how many tokens and events came."""
    first_s, events, last = 0.0, 0, b""
    async for piece in pieces:
        first_s = first_s or time.perf_counter() - began
        events += piece.count(b'"delta":{"')
        last = last[-400:] + piece
    used = json.loads(last[last.rindex(b'"usage":{') + 8 : last.rindex(b"}\n\ndata: [DONE]")])
    return first_s, used["completion_tokens"], events


class Http1Chats:
    """A connection of HTTP/1.1 that is kept."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def chat(self, tokens: int) -> tuple[float, int, int]:
        """Return the time to the first event, and how many tokens and events came."""
        body = _body(tokens)
        head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        began = time.perf_counter()
        self._writer.write(head.encode() + body)
        answer = await self._reader.readuntil(b"\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 200"), answer
        return await _read(began, self._pieces(answer))

    async def _pieces(self, head: bytes) -> AsyncIterator[bytes]:
        """Yield a body's chunks; one whose first piece was its last has a length instead."""
        _, said, length = head.partition(b"content-length: ")
        if said:
            yield await self._reader.readexactly(int(length.partition(b"\r\n")[0]))
            return
        while size := int(await self._reader.readuntil(b"\r\n"), 16):
            yield await self._reader.readexactly(size + 2)
        await self._reader.readexactly(2)


class Http2Chats(asyncio.Protocol):
    """A connection of HTTP/2: each chat is a stream."""

    _transport: asyncio.Transport

    def __init__(self) -> None:
        """Connect it, then call `chat`."""
        self._streams: dict[int, asyncio.Queue[bytes]] = {}
        self._next_id = 1
        self._received = b""
        self._encode = hpack.Encoder().encode  # fields are sent once, then by their numbers

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        opening = wire.PREFACE + wire.settings({wire.INITIAL_WINDOW: _WINDOW_BYTES})
        transport.write(opening + wire.window_update(0, wire.WIDE))

    def data_received(self, data: bytes) -> None:
        data = self._received + data
        at = 0
        while len(data) - at >= _HEAD_BYTES:
            kind, flags = data[at + 3], data[at + 4]
            end = at + _HEAD_BYTES + int.from_bytes(data[at : at + 3])
            if len(data) < end:
                break
            stream = int.from_bytes(data[at + 5 : at + 9])
            self._take(kind, flags, stream, data[at + _HEAD_BYTES : end])
            at = end
        self._received = data[at:]

    def _take(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind in (wire.SETTINGS, wire.PING) and not flags & wire.ACK:
            echoed = payload if kind == wire.PING else b""
            self._transport.write(wire.frame(kind, wire.ACK, payload=echoed))
        assert kind not in (wire.RST_STREAM, wire.GOAWAY), (kind, payload)
        queue = self._streams.get(stream)
        if queue is None:
            return
        if kind == wire.DATA and payload:
            queue.put_nowait(payload)
        if kind in (wire.DATA, wire.HEADERS) and flags & wire.END_STREAM:
            queue.put_nowait(_ENDED)

    async def chat(self, tokens: int) -> tuple[float, int, int]:
        """Return the time to the first event, and how many tokens and events came."""
        body, stream = _body(tokens), self._next_id
        self._next_id += 2
        self._streams[stream] = asyncio.Queue()
        block = self._encode([*_FIELDS, ("content-length", str(len(body)))])
        began = time.perf_counter()
        self._transport.write(
            wire.opening(stream, block) + wire.frame(wire.DATA, wire.END_STREAM, stream, body)
        )
        try:
            return await _read(began, self._pieces(stream))
        finally:
            del self._streams[stream]

    async def _pieces(self, stream: int) -> AsyncIterator[bytes]:
        while (piece := await self._streams[stream].get()) != _ENDED:
            yield piece


@contextlib.asynccontextmanager
async def http1(processor: ServiceProcess, streams: int) -> AsyncIterator[list[Any]]:
    """Yield what makes a chat, one for each stream; each has a connection."""
    host, port = _address(processor)
    opened = await asyncio.gather(
        *(asyncio.open_connection(host, port, limit=1 << 20) for _ in range(streams))
    )
    yield [Http1Chats(*pair).chat for pair in opened]
    for _, writer in opened:
        writer.close()


@contextlib.asynccontextmanager
async def http2(
    processor: ServiceProcess, streams: int, connections: int
) -> AsyncIterator[list[Any]]:
    """Yield what makes a chat, one for each stream, on so many connections at most."""
    loop, address = asyncio.get_running_loop(), _address(processor)
    opened = [
        await loop.create_connection(Http2Chats, *address) for _ in range(min(connections, streams))
    ]
    yield [opened[i % len(opened)][1].chat for i in range(streams)]
    for transport, _ in opened:
        transport.close()


def _address(processor: ServiceProcess) -> tuple[str, int]:
    host, _, port = processor.address.rpartition(":")
    return host, int(port)
