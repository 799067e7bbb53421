"""Accepting connections, also when the process has no more file descriptors.

asyncio's own server isn't used: on uvloop one failed accept may close its listening socket for
good, and neither shows a TLS connection before its handshake is over, so that nothing could bound
those.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable
from typing import Any

from millstream_server.runtime.telemetry.log import get_log

log = get_log(__name__)

_AT_ONCE = 16
"""Accepted before the event loop does something else: 5 ms with what follows for each."""
_PAUSE_S = 0.05
"""Between tries to accept while nothing can be accepted."""
_SAY_AGAIN_S = 60.0
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
"""Errors of the connection that was to be accepted, accept(2); the next may be sound."""


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
        """Accept no more; the sockets stay open."""
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

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(_AT_ONCE):
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
