"""How one connection's frames are taken: in slices of time, with pauses, so that nobody waits."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from millstream_server.runtime.transport.limits.work import Work

_YIELD_S = 0.0003
"""A read that takes longer is the connection's last in this turn of the loop: uvloop would read up
to 32 times from one socket before it looks at others."""
_SLICE_S = 0.0001
"""Who is let go on may take so long, however little is left of the turn: at least one frame."""
_NEW_S = 0.0014
"""A connection is new until its frames have taken so long: enough for the preface, settings and the
first request, which else would wait for all that stay silent. A new one gets the shortest slices:
of a burst of hundreds each comes to its first request soon."""
_COUNTED_S = 0.0005
"""Most of one slice that counts against `_NEW_S`: by the clock a slice takes longer when other
processes use the machine."""


class Intake:
    """Passes frames on. 1 KiB may hold dozens of requests, so a turn of the loop stays short.

    Where connections must wait, those go first whose RPCs bring their messages.
    """

    __slots__ = (
        "_goes_last",
        "_handle",
        "_loop",
        "_paused",
        "_socket",
        "_start",
        "_stopped",
        "_took_s",
        "_unread",
        "_work",
    )

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        work: Work,
        handle: Callable[[bytes], bool],
        start: Callable[[], float],
        goes_last: Callable[[], bool],
    ) -> None:
        """Pass bytes to ``handle``, which reads one frame and returns whether there was one.

        ``start`` is called after a slice's last frame; it returns the time, in seconds, that its
        requests are about to take. ``goes_last`` tells `WorkShare` whether others go first.
        """
        self._loop = loop
        self._work = work
        self._handle = handle
        self._start = start
        self._goes_last = goes_last
        self._socket: Any = None
        self._unread = b""
        """Bytes that wait for their turn; there may be frames before them."""
        self._paused = False
        """It waits: reading is paused."""
        self._stopped = False
        self._took_s = 0.0
        """What its frames, and the requests in them, have taken so far."""

    def open(self, transport: Any) -> None:
        """Pause and resume ``transport``."""
        self._socket = transport

    def stop(self) -> None:
        """Take nothing more, and forget the connection: without a cycle its memory is free now."""
        self._stopped = True
        self._handle, self._start, self._goes_last = _drop, float, bool
        self._unread = b""
        self._work.close()

    @property
    def waits(self) -> bool:
        """Whether bytes that have come aren't looked at for now."""
        return self._paused

    @property
    def last(self) -> bool:
        """See `Waiting`."""
        return self._goes_last()

    @property
    def new(self) -> bool:
        """See `Waiting`."""
        return self._took_s < _NEW_S

    def take(self, data: bytes) -> None:
        """Take bytes from the socket."""
        if self._stopped:
            return
        if self._paused or self._work.share.turn_s <= 0:
            self._unread += data
            self._wait()
        else:
            self._pass_on(data, self._work.share.turn_s)

    def go_on(self) -> None:
        """See `Waiting`."""
        if self._stopped:
            return
        self._paused = False
        data, self._unread = self._unread, b""
        self._socket.resume_reading()
        self._pass_on(data, _SLICE_S if self.new else max(self._work.share.turn_s, _SLICE_S))

    def _pass_on(self, data: bytes, slice_s: float) -> None:
        share = self._work.share
        began_s = time.perf_counter()
        until_s = began_s + slice_s
        more = self._handle(data)
        while more and not self._stopped and time.perf_counter() <= until_s:
            more = self._handle(b"")
        if self._stopped:
            return
        begun_s = self._start()
        took_s = share.cpu_s(time.perf_counter() - began_s)
        self._took_s += min(took_s, _COUNTED_S) + begun_s
        share.used(took_s + begun_s)
        pause_s = self._work.took(took_s, begun_s, self._loop.time())
        if more or pause_s or took_s > _YIELD_S:
            self._wait(pause_s)

    def _wait(self, pause_s: float = 0.0) -> None:
        """Read nothing until a later turn of the loop, after a pause."""
        if self._paused or self._stopped:
            return
        self._paused = True
        self._socket.pause_reading()
        if pause_s:
            self._loop.call_later(pause_s, self._work.share.wait, self)
        else:
            self._work.share.wait(self)


def _drop(_: bytes) -> bool:
    """Stand for the connection that is over."""
    return False
