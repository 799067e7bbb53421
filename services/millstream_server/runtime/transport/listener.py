"""New connections of a server: who is let in, the TLS handshake, and what is spoken.

asyncio's own server isn't used: on uvloop one failed accept may close its listening socket for
good, and neither shows a TLS connection before its handshake is over, so that nothing could bound
those.
"""

from __future__ import annotations

import asyncio
import errno
import resource
import socket
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from millstream_server.runtime.memory import trim_in_background
from millstream_server.runtime.rpc.call import key_of_address
from millstream_server.runtime.rpc.ledger import Place, Places
from millstream_server.runtime.security.tls import H2, ServerTls
from millstream_server.runtime.telemetry.log import get_log
from millstream_server.runtime.transport.options import TransportOptions
from millstream_server.runtime.transport.sockets import Listening, listen_on, peer_name

log = get_log(__name__)

_SHUTDOWN_S = 2.0
"""Longest wait for a caller's part in the end of TLS."""
_PATIENCE_S = 0.25
"""A handshake may be ended for another one after this: a normal one takes two round trips. With it
a caller that begins handshakes and says nothing has to begin 4,000 a second to hold others up."""
_FULL_PAUSE_S = 0.01
"""Between looks for room while all handshakes have begun within that time."""
_SAY_AGAIN_S = 60.0
_MANY = 256
_OWN_DESCRIPTORS = 128
"""Kept for files, workers and ports; or a quarter of all, if that is more."""
_ACCEPTED_AT_ONCE = 16
"""Accepted before the event loop does something else: 5 ms with what follows for each."""
_ACCEPTED_LAST = 1024
"""Of those that the kernel holds when a socket is closed, which would reset them."""
_LATE_S = 1.0
"""How long a connection that was accepted last may take to bring its first bytes."""
_PAUSE_S = 0.05
"""Between tries to accept while nothing can be accepted."""
_OF_ONE_CONNECTION = frozenset(
    {
        errno.ECONNABORTED,
        errno.EPROTO,
        errno.EPERM,
        errno.ENETDOWN,
        errno.ENOPROTOOPT,
        errno.EHOSTDOWN,
        errno.ENONET,
        errno.EHOSTUNREACH,
        errno.EOPNOTSUPP,
        errno.ENETUNREACH,
    }
)
"""Errors of the connection that was to be accepted, accept(2); the next may be normal."""
_HTTP_2 = b"PRI * HTTP/2"
"""How every connection of HTTP/2 begins."""

Speaker = Callable[[Place], asyncio.Protocol]
"""Makes the protocol that serves a connection and frees its place in `connection_lost`."""


class Listener:
    """Accepts connections on addresses. Order of calls: `bind`, `start`, `close`, `closed`.

    Above its bounds the caller with most connections loses the one that is unused for longest.
    """

    def __init__(self, http2: Speaker, http1: Speaker, options: TransportOptions) -> None:
        """Serve with what ``http2`` and ``http1`` make; it says by its place when it is used."""
        self._options = options
        self._http2 = http2
        self._http1 = http1
        most = min(options.max_connections, _most_descriptors())
        self._empty = asyncio.Event()
        self._places = Places(
            most, min(options.max_connections_per_address, most), emptied=self._empty.set
        )
        self._handshakes = Places(
            options.max_handshakes, options.max_handshakes, patience_s=_PATIENCE_S
        )
        self._bound: list[tuple[Listening, ServerTls | None]] = []
        self._acceptors: list[Acceptor] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._queued: dict[str, deque[tuple[socket.socket, Place, ServerTls]]] = {}
        """Connections whose TLS handshake hasn't begun, by caller."""
        self._refused_at_s = -_SAY_AGAIN_S

    def bind(self, address: str, tls: ServerTls | None = None) -> int:
        """Listen on HOST:PORT, [IPv6]:PORT or unix:/path; return the port, 0 for a Unix socket.

        Connections wait until `start`.

        Raises:
            OSError: the address can't be bound.
            SettingsError: OpenSSL refuses the files of ``tls``.
        """
        if tls is not None:
            tls.context()
        listening = listen_on(address, backlog=self._options.backlog)
        self._bound.append((listening, tls))
        return listening.port

    def start(self) -> None:
        for listening, tls in self._bound:
            take = partial(self._take, tls)
            self._acceptors.append(Acceptor(listening.sockets, take, self._places.make_room))

    def close(self, *, at_once: bool = False) -> None:
        """Listen no more; cut what brings no first bytes within a second, or ``at_once``."""
        for acceptor in self._acceptors:
            acceptor.close()
        for listening, _ in self._bound:
            listening.close()
        self._bound, self._acceptors = [], []
        if at_once:
            self._cut_opening()
        else:
            asyncio.get_running_loop().call_later(_LATE_S, self._cut_opening)

    def opening(self) -> list[Place]:
        """Return the places of connections that haven't brought their first bytes."""
        return [place for place in self._places.all() if not place.opened]

    def _cut_opening(self) -> None:
        for place in self.opening():
            place.give_up()

    def give_memory_back(self) -> None:
        """Give back what many connections had: glibc keeps small blocks, 50 KB of each."""
        if self._places.peak > _MANY and self._places.used < self._places.peak // 8:
            self._places.peak = self._places.used
            trim_in_background()

    async def closed(self) -> None:
        while self._places.used:
            self._empty.clear()
            await self._empty.wait()

    def _take(self, tls: ServerTls | None, accepted: socket.socket, address: Any) -> None:
        """Open an accepted connection, with TLS in its turn; or close it, if there is no room."""
        key = key_of_address(peer_name(address))
        if not self._places.has_room(key):
            accepted.close()
            self._say_refused(key)
            return
        if accepted.family != socket.AF_UNIX:
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        place = self._places.open(key, accepted.close)
        if tls is None:
            self._begin(accepted, place)
            return
        if not self._queued:
            asyncio.get_running_loop().call_soon(self._begin_next)
        self._queued.setdefault(key, deque()).append((accepted, place, tls))

    def _begin_next(self) -> None:
        """Begin one TLS handshake in each turn of the loop, of each caller in turn.

        A handshake takes about a millisecond: a thousand of one caller would hold up all others.
        """
        loop, key = asyncio.get_running_loop(), next(iter(self._queued))
        if not self._handshakes.has_room(key):
            loop.call_later(_FULL_PAUSE_S, self._begin_next)
            return
        queue = self._queued.pop(key)
        accepted, place, tls = queue.popleft()
        self._begin(accepted, place, tls, self._handshakes.open(key, place.close))
        if queue:
            self._queued[key] = queue  # at the end
        if self._queued:
            loop.call_soon(self._begin_next)

    def _begin(
        self,
        accepted: socket.socket,
        place: Place,
        tls: ServerTls | None = None,
        handshake: Place | None = None,
    ) -> None:
        task = asyncio.ensure_future(self._open(accepted, place, tls))
        task.add_done_callback(lambda task: self._opened(task, place, handshake))
        self._tasks.add(task)

    async def _open(self, accepted: socket.socket, place: Place, tls: ServerTls | None) -> None:
        if accepted.fileno() < 0:  # given up before this task's first step
            place.free()
            return
        if (task := asyncio.current_task()) is not None:
            place.give_up = task.cancel
        secured: dict[str, Any] = {}
        if tls is not None:
            secured["ssl"] = tls.context()
            secured["ssl_handshake_timeout"] = self._options.handshake_s
            secured["ssl_shutdown_timeout"] = _SHUTDOWN_S
        loop = asyncio.get_running_loop()
        opening = Opening(place, self._http2, self._http1, self._options.preface_s)
        await loop.connect_accepted_socket(lambda: opening, accepted, **secured)

    def _opened(self, task: asyncio.Task[None], place: Place, handshake: Place | None) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            write = log.debug if isinstance(error, OSError) else log.error
            write("a connection failed", caller=place.caller_key, reason=error)
        if error is not None or task.cancelled():
            place.free()
        if handshake is not None:
            handshake.free()

    def _say_refused(self, key: str) -> None:
        now_s = asyncio.get_running_loop().time()
        if now_s - self._refused_at_s >= _SAY_AGAIN_S:
            self._refused_at_s = now_s
            log.warning("connections refused: too many are in use", by=key, open=self._places.used)


def _most_descriptors() -> int:
    """Return how many connections the limit of open files allows."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return 1 << 30
    return max(1, soft - max(_OWN_DESCRIPTORS, soft // 4))


class Acceptor:
    """Accepts the connections of listening sockets until it is closed."""

    def __init__(
        self,
        sockets: list[socket.socket],
        take: Callable[[socket.socket, Any], None],
        shed: Callable[[], bool],
    ) -> None:
        """Give accepted sockets, non-blocking, and their other ends' addresses to ``take``.

        ``shed`` closes a connection when the process has no more file descriptors.
        """
        self._loop = asyncio.get_running_loop()
        self._sockets = sockets
        self._take = take
        self._shed = shed
        self._resuming: asyncio.TimerHandle | None = None
        self._said_at_s = -_SAY_AGAIN_S
        self._resume()

    def close(self) -> None:
        for each in self._sockets:
            self._accept(each, _ACCEPTED_LAST)
        self._stop_reading()
        self._sockets = []

    def _stop_reading(self) -> None:
        if self._resuming is not None:
            self._resuming.cancel()
            self._resuming = None
        for each in self._sockets:
            self._loop.remove_reader(each)

    def _pause(self) -> None:
        self._stop_reading()
        self._resuming = self._loop.call_later(_PAUSE_S, self._resume)

    def _resume(self) -> None:
        self._resuming = None
        for each in self._sockets:
            self._loop.add_reader(each, self._accept, each)

    def _accept(self, listening: socket.socket, most: int = _ACCEPTED_AT_ONCE) -> None:
        for _ in range(most):
            try:
                accepted, address = listening.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                if error.errno in _OF_ONE_CONNECTION:
                    continue
                self._failed(error)
                return
            accepted.setblocking(False)  # noqa: FBT003 - the library's signature
            self._take(accepted, address)

    def _failed(self, error: OSError) -> None:
        """Wait a little: the connection stays in the queue, and the socket readable."""
        self._pause()
        closed_one = self._shed()
        now_s = self._loop.time()
        if now_s - self._said_at_s >= _SAY_AGAIN_S:
            self._said_at_s = now_s
            log.error(
                "can't accept connections; raise the limit of open files",
                reason=error,
                closed_idle=closed_one,
            )


class Opening(asyncio.Protocol):
    """Waits for a connection's first bytes, and gives it to the protocol that understands them.

    With TLS the client chooses in its handshake (ALPN): without h2 it is HTTP/1.1.
    """

    def __init__(self, place: Place, http2: Speaker, http1: Speaker, limit_s: float) -> None:
        """Wait for ``limit_s`` at most, once the handshake is over."""
        self._place = place
        self._http2 = http2
        self._http1 = http1
        self._limit_s = limit_s
        self._received = b""
        self._transport: Any = None
        self._timer: asyncio.TimerHandle | None = None
        self._given = False

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._place.give_up = transport.abort
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._limit_s, transport.abort)

    def data_received(self, data: bytes) -> None:
        """Give the connection away, or wait for more bytes."""
        self._received += data
        speaks_http2 = self._speaks_http2()
        if speaks_http2 is None:
            return
        self._stop_waiting()
        self._given = True
        self._place.opened = True
        protocol = (self._http2 if speaks_http2 else self._http1)(self._place)
        self._transport.set_protocol(protocol)
        protocol.connection_made(self._transport)
        protocol.data_received(self._received)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        if not self._given:
            self._place.free()

    def _speaks_http2(self) -> bool | None:
        secured = self._transport.get_extra_info("ssl_object")
        if secured is not None:
            return bool(secured.selected_alpn_protocol() == H2)
        start = self._received[: len(_HTTP_2)]
        if start == _HTTP_2:
            return True
        return None if _HTTP_2.startswith(start) else False

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
