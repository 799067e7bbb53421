"""A server of gRPC and HTTP on this transport: its methods, its sockets, its connections."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from functools import partial

from millstream_server.runtime.errors import OverloadedError
from millstream_server.runtime.rpc.health import Health
from millstream_server.runtime.rpc.http import Endpoints
from millstream_server.runtime.rpc.ledger import overloaded
from millstream_server.runtime.rpc.serving import MethodTable, Rpcs
from millstream_server.runtime.telemetry.log import get_log
from millstream_server.runtime.transport.connection import Connection
from millstream_server.runtime.transport.http1 import Http1Connection
from millstream_server.runtime.transport.listener import Listener
from millstream_server.runtime.transport.options import Bounds, TransportOptions
from millstream_server.runtime.transport.probes import States
from millstream_server.runtime.transport.stream import Stream
from millstream_server.runtime.work.fair_queue import PoolLimits
from millstream_server.runtime.work.pool import WorkPool

log = get_log(__name__)

_TICK_S = 1.0
_SEEN_PAUSE_S = 0.03
_AT_ONCE, _TICK_PAUSE_S = 64, 0.001
"""Connections that are ticked in one turn of the loop, and the pause after them."""
_ENDED_AT_ONCE = 8


class H2Server(MethodTable):
    """Serves RPCs. Order of calls: add servicers, `bind`, `start`, `stop`.

    The generated functions `add_…Servicer_to_server` take it in place of a grpc.aio server.
    """

    def __init__(
        self,
        rpcs: Rpcs,
        options: TransportOptions,
        states: States = lambda: Health({}),
        pool: WorkPool | None = None,
    ) -> None:
        """Serve with the layers of ``rpcs``, within the limits of ``options``.

        ``states`` returns the health that HTTP probes ask for; ``pool`` converts long JSON. Without
        it the server has one of its own.
        """
        super().__init__(rpcs)
        self.options = options
        self.states = states
        self.pool = pool or WorkPool(PoolLimits())
        self._own_pool = None if pool else self.pool
        self.endpoints: Endpoints | None = None
        """What serves HTTP that isn't gRPC; None: probes alone are."""
        self.leaving = False
        """A drain was announced: responses of HTTP/1.1 say that their connections close."""
        self.connections: set[Connection | Http1Connection] = set()
        self.bounds = bounds = Bounds(options)
        bounds.streams.shed, bounds.silent.shed = _shed_stream, _shed_silent
        bounds.received.shed, bounds.unsent.shed = _shed_received, _shed_unsent
        speakers = partial(Connection, self), partial(Http1Connection, self)
        self._listener = Listener(*speakers, options)
        self.bind = self._listener.bind
        self._ticking: asyncio.TimerHandle | None = None
        self._empty = asyncio.Event()
        self._gone: deque[Stream] = deque()

    async def start(self) -> None:
        self.bounds.show()
        self._listener.start()
        self._tick()

    async def stop_accepting(self) -> None:
        """Take no more connections, send GOAWAY on all; return when all callers have seen it.

        What is open goes on, and RPCs that were sent before their callers saw it are served. Who
        doesn't acknowledge it is waited for `Ending`'s time; on HTTP/1.1 a response says it, or the
        end of an idle connection.
        """
        self.leaving = True
        self._listener.close()
        while True:
            left = [each for each in self.connections if not each.takes_no_more]
            if not (left or self._listener.opening()):
                return
            for connection in left:
                connection.drain()
            await asyncio.sleep(_SEEN_PAUSE_S)

    async def stop(self, grace_s: float | None) -> None:
        """Take no more connections and RPCs; after ``grace_s`` cut what is open. None: at once."""
        self.leaving = True
        self._listener.close(at_once=True)
        for connection in list(self.connections):
            connection.drain()
            connection.end_if_unused()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s or 0.0):
                while self.connections:
                    self._empty.clear()
                    await self._empty.wait()
        for connection in list(self.connections):
            connection.abort()
        while self.connections:
            self._empty.clear()
            await self._empty.wait()
        while self._gone:
            self._gone.popleft().lost()
        if self._ticking is not None:
            self._ticking.cancel()
        if self._own_pool:
            self._own_pool.close()
        await self._listener.closed()

    def forget(self, connection: Connection | Http1Connection) -> None:
        self.connections.discard(connection)
        if not self.connections:
            self._empty.set()

    def lost(self, stream: Stream) -> None:
        """End a stream whose connection is lost, soon: a turn's end takes 0.3 ms.

        Of thousands that are lost at once, a few end in each turn of the loop.
        """
        if not self._gone:
            asyncio.get_running_loop().call_soon(self._end_gone)
        self._gone.append(stream)

    def _end_gone(self) -> None:
        for _ in range(min(_ENDED_AT_ONCE, len(self._gone))):
            self._gone.popleft().lost()
        if self._gone:
            asyncio.get_running_loop().call_soon(self._end_gone)

    def _tick(self) -> None:
        self.bounds.tick()
        self.bounds.work.forget(asyncio.get_running_loop().time())
        self._listener.give_memory_back()
        self._tick_some(list(self.connections))

    def _tick_some(self, left: list[Connection | Http1Connection]) -> None:
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


def _shed_stream(connection: Connection | Http1Connection) -> None:
    """End an RPC: the oldest without a message, else the newest."""
    if connection.silent:
        _shed_silent(connection)
    elif connection.streams:
        stream = next(reversed(connection.streams.values()))
        connection.over(stream.id)
        stream.fail(_busy("streams", "too many RPCs are open, and this caller has most of them"))


def _shed_silent(connection: Connection | Http1Connection) -> None:
    """End the oldest RPC whose first message has not come."""
    stream = next(iter(connection.silent.values()), None)
    if stream is not None:
        connection.over(stream.id)
        why = "too many RPCs are open without a message, and this caller has most of them"
        stream.fail(_busy("streams", f"{why}; send the first message at once"))


def _shed_received(connection: Connection | Http1Connection) -> None:
    """End the RPC whose unread requests are largest, or the connection if its headers are."""
    stream = max(connection.streams.values(), key=lambda s: s.inbox.held_bytes, default=None)
    if stream is not None and stream.inbox.held_bytes > connection.head_bytes:
        why = "too many bytes of requests are under way, and most of them are of this caller"
        stream.fail(_busy("received_bytes", f"{why}; send fewer large requests at once"))
    elif connection.head_bytes:
        connection.shed_head()


def _shed_unsent(connection: Connection | Http1Connection) -> None:
    """End the RPC whose unsent response is largest, or the connection if none waits."""
    stream = max(connection.streams.values(), key=lambda s: len(s.sender.unsent), default=None)
    if stream is not None and stream.sender.unsent:
        why = "too many responses wait for callers that don't read"
        stream.fail(_busy("unsent_bytes", f"{why}, and this caller has most of them; read them"))
    elif connection.stuck_bytes:
        connection.abort()


def _busy(cause: str, why: str) -> OverloadedError:
    log.warning("RPC ended to stay within a bound", bound=cause)
    return overloaded(cause, f"the server is busy: {why}")
