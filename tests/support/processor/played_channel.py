"""A connection to a worker that the test plays, without sockets."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import Any

from millstream_server.links.channel import Rpc


class PlayedStream:
    """Keeps what is written, returns what the test puts in; None ends it, an exception fails it."""

    def __init__(self) -> None:
        self.written: list[Any] = []
        self.half_closed = False
        self.comes: asyncio.Queue[Any] = asyncio.Queue()

    async def read(self) -> Any:
        message = await self.comes.get()
        if isinstance(message, Exception):
            raise message
        return message

    async def write(self, message: Any) -> None:
        self.written.append(message)

    async def done_writing(self) -> None:
        self.half_closed = True

    def cancel(self) -> None:
        pass


class PlayedChannel:
    """A `links.channel.Channel`: streams by ``Service/Method``, responses or futures of them."""

    stale = False

    def __init__(self, **responses: Any) -> None:
        self.streams: defaultdict[str, PlayedStream] = defaultdict(PlayedStream)
        self._responses = responses

    def stream(self, rpc: Rpc) -> PlayedStream:
        return self.streams[rpc.name.rpartition(".")[2]]

    def watch(self, rpc: Rpc, request: Any) -> PlayedStream:
        return self.stream(rpc)

    async def call(self, rpc: Rpc, request: Any, **_: Any) -> Any:
        response = self._responses[rpc.name.rpartition("/")[2]]
        return await response if isinstance(response, asyncio.Future) else response

    async def aclose(self) -> None:
        pass
