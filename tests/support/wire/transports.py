"""Servers of test services on each of the two transports: clients' (h2), workers' (grpc)."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from millstream_server.runtime.rpc.call import Layer
from millstream_server.runtime.rpc.channel import MAX_CONCURRENT_STREAMS, server_options
from millstream_server.runtime.rpc.grpc_server import GrpcServer, RpcInterceptor
from millstream_server.runtime.rpc.served_call import OpenCalls
from millstream_server.runtime.rpc.serving import Rpcs
from millstream_server.runtime.transport.options import TransportOptions
from millstream_server.runtime.transport.server import H2Server

TransportName = Literal["h2", "grpc"]
TRANSPORTS: tuple[TransportName, ...] = ("h2", "grpc")
_current: TransportName = "h2"


def current() -> TransportName:
    """Return the transport of servers that a test doesn't choose one for."""
    return _current


def clients(max_receive_bytes: int = 1 << 20) -> TransportOptions | None:
    """Return the option of a `Server` that chooses this transport."""
    return TransportOptions(max_receive_bytes=max_receive_bytes) if _current == "h2" else None


@contextlib.contextmanager
def using(transport: TransportName) -> Iterator[None]:
    """Let the servers of a test have this transport; see the marker `both_transports`."""
    global _current  # noqa: PLW0603 - a test makes its servers in many helpers
    before, _current = _current, transport
    try:
        yield
    finally:
        _current = before


def new_server(
    *layers: Layer,
    open_calls: OpenCalls | None = None,
    max_receive_bytes: int = 4 << 20,
    max_streams: int = MAX_CONCURRENT_STREAMS,
    **limits: float,
) -> Any:
    """Make a server on the current transport: add servicers, `bind`, `start`, `stop`.

    ``limits`` are names that `TransportOptions` and `server_options` have in common.
    """
    rpcs = Rpcs(layers, open_calls=open_calls or OpenCalls())
    if _current == "h2":
        options: dict[str, Any] = {"max_streams": max_streams, **limits}
        return H2Server(rpcs, TransportOptions(max_receive_bytes=max_receive_bytes, **options))
    arguments = server_options(
        max_receive_bytes=max_receive_bytes, max_concurrent_streams=max_streams, **limits
    )
    return GrpcServer(RpcInterceptor(rpcs), arguments)


@dataclass(frozen=True)
class Served:
    """A running server."""

    port: int
    _open_calls: OpenCalls

    @property
    def open_calls(self) -> int:
        """How many handlers run."""
        return self._open_calls.count


@contextlib.asynccontextmanager
async def serving(
    services: Mapping[str, Mapping[str, Any]],
    *,
    max_receive_bytes: int = 1 << 20,
    **options: Any,
) -> AsyncIterator[Served]:
    """Serve handlers, by service and method, on a free port, without layers, as clients are served.

    ``options`` are `TransportOptions`. Pings may come as often as they like.
    """
    calls = OpenCalls()
    options = {"min_ping_interval_s": 0.0, **options}
    chosen = TransportOptions(max_receive_bytes=max_receive_bytes, **options)
    server = H2Server(Rpcs(open_calls=calls), chosen)
    for name, handlers in services.items():
        server.add_registered_method_handlers(name, handlers)
    port = server.bind("127.0.0.1:0")
    await server.start()
    try:
        yield Served(port, calls)
    finally:
        await server.stop(None)
