"""The Python client in a simulated suite: grpc.aio's channel, as far as the client uses it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import grpc

from millstream_server.links.channel import CallError, Rpc
from millstream_server.runtime.errors import Code
from millstream_server.runtime.rpc.status import DETAILS_KEY
from tests.support.simulation.rpc import SimulatedChannel, SimulatedStream

_RECONNECT_S = 0.2


class LibraryTransport:
    """A `millstream_client.transport.Transport` to several Processors."""

    def __init__(self, channels: Sequence[SimulatedChannel], ready: Callable[[int], bool]) -> None:
        """``ready`` tells whether a Processor, by its number, takes new calls."""
        self._channels = channels
        self._ready = ready
        self._next = 0

    def open_aio(self) -> Any:
        return self

    def metadata(self) -> tuple[tuple[str, str], ...]:
        return ()

    # ---- the channel

    def unary_stream(self, path: str, serialize: Any, parse: Any, **_: Any) -> Any:
        rpc = Rpc(path.removeprefix("/"), None, parse.__self__)

        def call(message: Any, *, timeout: float | None, **_: Any) -> _Call:
            return _Call(self._pick().begin(rpc, message, timeout_s=timeout), timeout)

        return call

    def _pick(self) -> SimulatedChannel:
        """Return the next channel in turn whose Processor takes calls; else any."""
        numbers = [(self._next + i) % len(self._channels) for i in range(len(self._channels))]
        found = next(filter(self._ready, numbers), numbers[0])
        self._next = found + 1
        return self._channels[found]

    async def channel_ready(self) -> None:
        while not any(map(self._ready, range(len(self._channels)))):
            await asyncio.sleep(_RECONNECT_S)

    async def close(self, grace: object = None) -> None:
        for channel in self._channels:
            await channel.aclose()


class _Call:
    """A call with a stream of responses."""

    def __init__(self, stream: SimulatedStream, timeout_s: float | None) -> None:
        self._stream = stream
        self._late = False
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(timeout_s, self._end) if timeout_s is not None else None

    def _end(self) -> None:
        self._late = True
        self._stream.cancel()

    def cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._stream.cancel()

    def __aiter__(self) -> _Call:
        return self

    async def __anext__(self) -> Any:
        try:
            message = await self._stream.read()
        except CallError as error:
            raise self._error(error) from None
        if message is None:
            raise StopAsyncIteration
        return message

    def _error(self, error: CallError) -> grpc.aio.AioRpcError:
        code, text = error.code, str(error).partition(": ")[2]
        if self._late:
            code, text = Code.DEADLINE_EXCEEDED, "Deadline Exceeded"
        details = error.status
        trailers = grpc.aio.Metadata(*([(DETAILS_KEY, details)] if details else []))
        return grpc.aio.AioRpcError(
            grpc.StatusCode[code.name], grpc.aio.Metadata(), trailers, text, None
        )
