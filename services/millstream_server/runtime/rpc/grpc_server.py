"""A grpc.aio server as one of a `Server`'s transports, and the watch over its life."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import grpc

from millstream_server.runtime.rpc.channel import ChannelArguments, bind
from millstream_server.runtime.rpc.interceptor import RpcInterceptor
from millstream_server.runtime.rpc.serving import Handler
from millstream_server.runtime.security.tls import ServerTls
from millstream_server.runtime.telemetry.log import get_log

log = get_log(__name__)

_WATCH_S = 0.5


class GrpcServer:
    """grpc.aio's server. Order of calls: add servicers, `bind`, `start`, `stop`."""

    def __init__(
        self,
        interceptor: RpcInterceptor,
        arguments: ChannelArguments,
        died: Callable[[], None] = lambda: None,
    ) -> None:
        """Serve RPCs through ``interceptor``.

        ``died`` is called when gRPC accepts no more calls; only a new process helps.
        """
        self._server = grpc.aio.server(interceptors=[interceptor], options=arguments)
        self._watching: asyncio.Task[None] | None = None
        self._died = died

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Handler]) -> None:
        """Add a service's methods."""
        self._server.add_registered_method_handlers(service, dict(handlers))  # type: ignore[attr-defined]

    def add_generic_rpc_handlers(self, handlers: Iterable[Any]) -> None:
        """Add `grpc.GenericRpcHandler`s."""
        self._server.add_generic_rpc_handlers(tuple(handlers))

    def bind(self, address: str, tls: ServerTls | None = None) -> int:
        """Bind an address, HOST:PORT; return the port.

        Raises:
            OSError: it can't be bound.
        """
        return bind(self._server, address, tls.credentials() if tls else None)

    async def start(self) -> None:
        """Accept connections."""
        await self._server.start()
        self._watching = asyncio.ensure_future(self._watch())

    async def stop(self, grace_s: float | None) -> None:
        """Take no more connections and RPCs; after ``grace_s`` cut what is open. None: at once."""
        if self._watching is not None:
            self._watching.cancel()
        await self._server.stop(grace_s)

    async def _watch(self) -> None:
        """Detect that gRPC serves no more: a `:path` that isn't UTF-8 ends grpcio 1.85's own loop.

        It happens before any code of ours runs. Open streams go on, new connections are refused,
        and gRPC reports nothing.
        """
        core: Any = self._server._server  # type: ignore[attr-defined]  # noqa: SLF001 - no public way
        while core.is_running():  # noqa: ASYNC110 - it sets no event
            await asyncio.sleep(_WATCH_S)
        log.error(
            "gRPC's serving loop died; this process finishes its work and exits",
            cause="a caller's frame, most likely a :path that isn't UTF-8",
        )
        self._died()
