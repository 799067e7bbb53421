"""Limits on open RPCs: their number, and the bytes of the messages they have sent."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import Message

from millstream_server.runtime.errors import OverloadedError
from millstream_server.runtime.retry_delay import jittered
from millstream_server.runtime.rpc.call import Call
from millstream_server.runtime.rpc.layer import Visit, service_of
from millstream_server.runtime.telemetry import metrics

_RETRY_S = 1.0
"""Retry delay of a refused client: a guess, since nothing here predicts when an RPC ends."""


def _size(message: Message) -> int:
    return message.ByteSize()


@dataclass(frozen=True, slots=True, kw_only=True)
class RpcLimits:
    """Limits over all open RPCs of the limited services together."""

    max_open_streams: int = 10_240
    max_open_bytes: int = 512 << 20
    held_bytes: Callable[[Message], int] = _size
    """Returns what a message may hold until its RPC ends; less where something else counts it."""


class LimitsLayer:
    """Refuses RPCs, and further messages of open ones, above the limits.

    Only the named services count: health checks, reflection and load reports must work when the
    server is full (`maximum_concurrent_rpcs` would refuse them too). A message's bytes count until
    its RPC ends, since its content may be kept that long, as a conversation's context is.
    """

    def __init__(self, services: Collection[str], limits: RpcLimits) -> None:
        """Limit the services with these full proto names; the gauge shows one layer per process."""
        self.open_streams = 0
        self.open_bytes = 0
        self._services = frozenset(services)
        self._limits = limits
        self.held_bytes = limits.held_bytes
        # Read at each scrape, which is cheaper than to set the gauge at every RPC.
        metrics.ADMISSION_OPEN_BYTES.set_function(lambda: self.open_bytes)

    def covers(self, method: str) -> bool:
        """See `Layer.covers`: the services it was made for."""
        return service_of(method) in self._services

    def enter(self, call: Call) -> Visit:
        """Count an RPC as open until it ends; see `Layer.enter`."""
        if self.open_streams >= self._limits.max_open_streams:
            raise _refusal("streams", f"{self.open_streams} RPCs are open already")
        self.open_streams += 1
        return _Held(self)

    def take(self, size: int) -> None:
        """Count bytes as held.

        Raises:
            OverloadedError: the limit would be exceeded.
        """
        if self.open_bytes + size > self._limits.max_open_bytes:
            raise _refusal("bytes", "the messages of its open RPCs fill its memory")
        self.open_bytes += size

    def give_back(self, size: int) -> None:
        """Count an RPC as ended and its bytes as free."""
        self.open_streams -= 1
        self.open_bytes -= size


class _Held(Visit):
    """The bytes that one RPC holds."""

    __slots__ = ("_bytes", "_layer")

    def __init__(self, layer: LimitsLayer) -> None:
        self._layer = layer
        self._bytes = 0

    def received(self, message: Any) -> None:
        if isinstance(message, Message):
            size = self._layer.held_bytes(message)
            self._layer.take(size)
            self._bytes += size

    def leave(self) -> None:
        self._layer.give_back(self._bytes)


def _refusal(cause: str, why: str) -> OverloadedError:
    metrics.ADMISSION_REFUSED.labels(cause).inc()
    return OverloadedError(
        f"the server is busy: {why}; retry later", retry_delay_s=jittered(_RETRY_S)
    )
