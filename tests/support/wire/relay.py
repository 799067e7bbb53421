"""A TCP proxy between a client and a server of this machine, for faults of the network."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator


class Relay:
    """Passes bytes on, until it is told otherwise."""

    def __init__(self, port: int) -> None:
        """Pass on to ``port`` of 127.0.0.1; `laid` opens the relay's own."""
        self.port = 0
        self._to = port
        self._flows = asyncio.Event()
        self._flows.set()
        self._refuses = False
        self.refused = 0
        """Connections that came after `cut`."""
        self._writers: set[asyncio.StreamWriter] = set()
        self._pumps: set[asyncio.Task[None]] = set()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def fall_silent(self) -> None:
        """Keep all bytes back, as where a node is gone: no FIN, no RST."""
        self._flows.clear()

    def cut(self) -> None:
        """Reset all connections, and each new one."""
        self._refuses = True
        for writer in self._writers:
            writer.transport.abort()

    def flow(self) -> None:
        """Pass on again."""
        self._refuses = False
        self._flows.set()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._refuses:
            self.refused += 1
            writer.transport.abort()
            return
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._to)
        except OSError:  # the server's process has ended
            writer.transport.abort()
            return
        for source, sink in ((reader, far_writer), (far_reader, writer)):
            pump = asyncio.ensure_future(self._pump(source, sink))
            self._pumps.add(pump)
            pump.add_done_callback(self._pumps.discard)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        self._writers.add(sink)
        with contextlib.suppress(ConnectionError):
            try:
                while data := await source.read(1 << 16):
                    await self._flows.wait()
                    sink.write(data)
                    await sink.drain()
            finally:
                self._writers.discard(sink)
                sink.close()

    @contextlib.asynccontextmanager
    async def laid(self) -> AsyncIterator[Relay]:
        """Listen on a free port."""
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            pumps = list(self._pumps)
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
