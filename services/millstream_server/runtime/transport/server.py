"""A gRPC server on this transport: its methods, its sockets, its connections."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Mapping
from typing import Any

from millstream_server.runtime.rpc.health import Health
from millstream_server.runtime.rpc.methods import MethodTable
from millstream_server.runtime.rpc.serving import Handler, Rpcs
from millstream_server.runtime.security.tls import ServerTls
from millstream_server.runtime.transport.connection import Connection, ServerParts
from millstream_server.runtime.transport.frames import take_frame
from millstream_server.runtime.transport.limits.fair_bound import Place
from millstream_server.runtime.transport.options import TransportOptions
from millstream_server.runtime.transport.ports.listener import Listener
from millstream_server.runtime.transport.ports.probes import States
from millstream_server.runtime.transport.shedding import make_bounds

_TICK_S = 1.0
_SEEN_PAUSE_S = 0.01
_AT_ONCE, _TICK_PAUSE_S = 64, 0.001
"""Connections that are ticked in one turn of the loop, and the pause after them."""


class H2Server:
    """Serves RPCs. Order of calls: add servicers, `bind`, `start`, `stop`.

    The generated functions `add_…Servicer_to_server` take it in place of a grpc.aio server.
    """

    def __init__(
        self, rpcs: Rpcs, options: TransportOptions, states: States = lambda: Health({})
    ) -> None:
        """Serve with the layers of ``rpcs``, within the limits of ``options``.

        ``states`` returns the health that HTTP probes ask for.
        """
        self._methods = MethodTable(rpcs)
        self._connections: set[Connection] = set()
        self._bounds = make_bounds(options)
        self._listener = Listener(self._make, states, options)
        self._parts = ServerParts(
            find=self._methods.find,
            options=options,
            bounds=self._bounds,
            states=states,
            take_frame=take_frame,
            opened=self._connections.add,
            closed=self._forget,
        )
        self._ticking: asyncio.TimerHandle | None = None
        self._empty = asyncio.Event()

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Handler]) -> None:
        """Add a service's methods."""
        self._methods.add_registered_method_handlers(service, handlers)

    def add_generic_rpc_handlers(self, handlers: Iterable[Any]) -> None:
        """Add `grpc.GenericRpcHandler`s."""
        self._methods.add_generic_rpc_handlers(handlers)

    def bind(self, address: str, tls: ServerTls | None = None) -> int:
        """Listen on HOST:PORT, [IPv6]:PORT or unix:/path; return the port, 0 for a Unix socket.

        Raises:
            OSError: the address can't be bound.
            SettingsError: OpenSSL refuses the files of ``tls``.
        """
        return self._listener.bind(address, tls)

    async def start(self) -> None:
        """Accept connections."""
        self._bounds.show()
        self._listener.start()
        self._tick()

    async def stop_accepting(self) -> None:
        """Take no more connections, send GOAWAY on all; return when all callers have seen it.

        What is open goes on, and RPCs that were sent before their callers saw it are served. Who
        doesn't acknowledge it is waited for `Ending`'s time.
        """
        self._begin_drain()
        while not all(each.ending.takes_no_more for each in self._connections):  # noqa: ASYNC110
            await asyncio.sleep(_SEEN_PAUSE_S)

    async def stop(self, grace_s: float | None) -> None:
        """Take no more connections and RPCs; after ``grace_s`` cut what is open. None: at once."""
        self._begin_drain()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s or 0.0):
                while self._connections:
                    self._empty.clear()
                    await self._empty.wait()
        for connection in list(self._connections):
            connection.abort()
        while self._connections:
            self._empty.clear()
            await self._empty.wait()
        if self._ticking is not None:
            self._ticking.cancel()
        await self._listener.closed()

    def _begin_drain(self) -> None:
        self._listener.close()
        for connection in list(self._connections):
            connection.drain()

    def _make(self, place: Place) -> Connection:
        return Connection(self._parts, place)

    def _forget(self, connection: Connection) -> None:
        self._connections.discard(connection)
        if not self._connections:
            self._empty.set()

    def _tick(self) -> None:
        self._bounds.tick()
        self._listener.give_memory_back()
        self._tick_some(list(self._connections))

    def _tick_some(self, left: list[Connection]) -> None:
        """Tick some connections in each turn of the loop: thousands take tens of milliseconds."""
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        for connection in left[-_AT_ONCE:]:
            connection.tick(now_s)
        del left[-_AT_ONCE:]
        if left:
            self._ticking = loop.call_later(_TICK_PAUSE_S, self._tick_some, left)
        else:
            self._ticking = loop.call_later(_TICK_S, self._tick)
