"""HTTP/1.1 as an attacker sends it: bytes made by hand, and a connection that counts what comes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator

from tests.benchmarks.hostile.attacker import Attack

CHAT = "/v1/chat/completions"
MODELS = "/v1/models"
_LIMIT = 1 << 12
"""Of a connection's reader: thousands of them must not fill the attacker's memory."""
_PIECE = 64 << 10
_ESTABLISHED = 1
"""A connection's state, as the kernel numbers them."""


def request(
    path: str,
    body: bytes = b"",
    *,
    verb: str = "POST",
    key: str | None = None,
    length: int | None = None,
    more: str = "",
    host: str = "localhost",
) -> bytes:
    """Make a request; ``length`` is said in place of the body's, ``more`` are further lines."""
    lines = [f"{verb} {path} HTTP/1.1", f"Host: {host}"]
    if key:
        lines.append(f"Authorization: Bearer {key}")
    if verb == "POST" and length != -1:
        lines.append(f"Content-Length: {len(body) if length is None else length}")
    return ("\r\n".join(lines) + "\r\n" + more + "\r\n").encode() + body


def chat(tokens: int, *, stream: bool = True) -> bytes:
    """Make the body of a chat."""
    return json.dumps(
        {
            "messages": [{"role": "user", "content": "hi"}],
            "max_tokens": tokens,
            "ignore_eos": True,
            "stream": stream,
        }
    ).encode()


class Http1:
    """An open connection; what it sends and receives is counted."""

    def __init__(
        self, attack: Attack, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._attack = attack
        self._reader = reader
        self.writer = writer

    async def send(self, data: bytes) -> None:
        """Send bytes when pace and socket allow.

        Raises:
            OSError: the connection is closed.
        """
        view = memoryview(data)
        for at in range(0, len(data), _PIECE):
            piece = view[at : at + _PIECE]
            await self._attack.pace.spend(len(piece))
            self.writer.write(piece)
            self._attack.tally.sent_bytes += len(piece)
            await self.writer.drain()

    def call(self) -> None:
        """Count a request that begins."""
        self._attack.tally.calls += 1

    async def read(self, most: int = _LIMIT) -> int:
        """Return how many bytes came; 0: the connection is closed, or nobody answers."""
        if self._attack.order.alone:
            return 0
        return self._counted(await self._reader.read(most))

    async def status(self) -> str:
        """Read one response that has a length; return its status, or how the connection ended."""
        how = "alone" if self._attack.order.alone else await self._status()
        self._attack.tally.answers[how] += 1
        return how

    async def _status(self) -> str:
        try:
            head = await self._reader.readuntil(b"\r\n\r\n")
            self._counted(head)
            _, said, length = head.partition(b"content-length: ")
            if said:
                self._counted(await self._reader.readexactly(int(length.partition(b"\r\n")[0])))
        except (asyncio.IncompleteReadError, ConnectionError):
            return "closed"
        return head.split(None, 2)[1].decode()

    @property
    def gone(self) -> bool:
        """Whether the server has ended it; who doesn't read learns it from the kernel alone."""
        if self.writer.transport.is_closing():
            return True
        info = self.writer.get_extra_info("socket").getsockopt(
            socket.IPPROTO_TCP, socket.TCP_INFO, 1
        )
        return bool(info[0] != _ESTABLISHED)

    def _counted(self, data: bytes) -> int:
        self._attack.tally.received_bytes += len(data)
        return len(data)


@contextlib.asynccontextmanager
async def opened(attack: Attack, *, receives_bytes: int = 0) -> AsyncIterator[Http1]:
    """Open a connection from the attacker's address; its socket's buffer may be small."""
    made = socket.socket()
    made.setblocking(False)  # noqa: FBT003 - the library's signature
    try:
        if receives_bytes:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receives_bytes)
        made.bind(attack.source())
        await asyncio.get_running_loop().sock_connect(made, ("127.0.0.1", attack.order.port))
        reader, writer = await asyncio.open_connection(sock=made, limit=_LIMIT)
    except BaseException:
        made.close()
        raise
    attack.tally.connections += 1
    try:
        yield Http1(attack, reader, writer)
    finally:
        writer.transport.abort()
