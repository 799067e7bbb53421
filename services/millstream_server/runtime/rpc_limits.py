"""Bounds on what open RPCs hold: how many there are, and the bytes of the messages they sent."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import Message

from millstream_server.runtime import metrics
from millstream_server.runtime.admission import jittered
from millstream_server.runtime.errors import OverloadedError
from millstream_server.runtime.handlers import Context, service_of

_RETRY_S = 1.0
"""When a refused client may come back: RPCs end for reasons we can't foresee from here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RpcLimits:
    """Bounds over all open RPCs of the limited services together."""

    max_open_streams: int = 10_000
    max_open_bytes: int = 512 << 20


class LimitsLayer:
    """Refuses RPCs, and further messages of open ones, that are over the limits.

    Only the named services count and are refused: health checks, reflection and load reports must
    answer above all when the server is full (`maximum_concurrent_rpcs` would refuse them too).
    A message's bytes count from when it is read until its RPC ends: what it said lives as long (a
    conversation's context does).
    """

    def __init__(self, services: Collection[str], limits: RpcLimits) -> None:
        """Limit the services with these full proto names."""
        self.open_streams = 0
        self.open_bytes = 0
        self._services = frozenset(services)
        self._limits = limits

    def covers(self, method: str) -> bool:
        """The services it was made for."""
        return service_of(method) in self._services

    @contextlib.contextmanager
    def around(
        self, requests: AsyncIterator[Any], context: Context
    ) -> Iterator[tuple[AsyncIterator[Any], Context]]:
        """Count one RPC in, and out with everything it holds."""
        if self.open_streams >= self._limits.max_open_streams:
            raise _refusal("streams", f"{self.open_streams} RPCs are open already")
        self.open_streams += 1
        held = _Held(self._take)
        try:
            yield held.each(requests), _CountingContext(context, held)
        finally:
            self.open_streams -= 1
            self.open_bytes -= held.bytes
            metrics.ADMISSION_OPEN_BYTES.dec(held.bytes)

    def _take(self, size: int) -> None:
        if self.open_bytes + size > self._limits.max_open_bytes:
            raise _refusal("bytes", "the messages of its open RPCs fill its memory")
        self.open_bytes += size
        metrics.ADMISSION_OPEN_BYTES.inc(size)


class _Held:
    """What one RPC holds."""

    __slots__ = ("_take", "bytes")

    def __init__(self, take: Callable[[int], None]) -> None:
        self.bytes = 0
        self._take = take

    async def each(self, requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
        async for request in requests:
            self.count(request)
            yield request

    def count(self, message: Any) -> None:
        if isinstance(message, Message):  # not the end of a stream, nor what didn't parse
            size = message.ByteSize()
            self._take(size)
            self.bytes += size


class _CountingContext:
    """A handler's context whose `read` counts."""

    def __init__(self, context: Context, held: _Held) -> None:
        self._context = context
        self._held = held

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    async def read(self) -> Any:
        message = await self._context.read()
        self._held.count(message)
        return message


def _refusal(cause: str, why: str) -> OverloadedError:
    metrics.ADMISSION_REFUSED.labels(cause).inc()
    return OverloadedError(
        f"the server is busy: {why}; retry later", retry_delay_s=jittered(_RETRY_S)
    )
