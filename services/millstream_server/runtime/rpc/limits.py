"""Limits on open RPCs: their number, and the bytes of the messages they have sent."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import Message

from millstream_server.runtime.rpc.call import Call, Visit, service_of
from millstream_server.runtime.rpc.ledger import Ledger
from millstream_server.runtime.telemetry import metrics


def _size(message: Message) -> int:
    return message.ByteSize()  # each message class has its own


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
        self.streams = Ledger(
            limits.max_open_streams,
            cause="streams",
            busy="the server is busy: {used} RPCs are open already; retry later",
        )
        self.bytes = Ledger(
            limits.max_open_bytes,
            busy="the server is busy: the messages of its open RPCs fill its memory; retry later",
        )
        self._services = frozenset(services)
        self.held_bytes = limits.held_bytes
        # Read at each scrape, which is cheaper than to set the gauge at every RPC.
        metrics.ADMISSION_OPEN_BYTES.set_function(lambda: self.bytes.used)

    def covers(self, method: str) -> bool:
        return service_of(method) in self._services

    def enter(self, call: Call) -> Visit:
        self.streams.take(1)
        return _Held(self)


class _Held(Visit):
    """The bytes that one RPC holds."""

    __slots__ = ("_bytes", "_layer")

    def __init__(self, layer: LimitsLayer) -> None:
        self._layer = layer
        self._bytes = 0

    def received(self, message: Any) -> None:
        if isinstance(message, Message | bytes):
            size = len(message) if isinstance(message, bytes) else self._layer.held_bytes(message)
            self._layer.bytes.take(size)
            self._bytes += size

    def leave(self) -> None:
        self._layer.streams.give_back(1)
        self._layer.bytes.give_back(self._bytes)
