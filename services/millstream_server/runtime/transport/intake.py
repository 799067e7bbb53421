"""How one connection's bytes are taken: in pieces and with pauses, so that they hold up nobody."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from millstream_server.runtime.transport.limits.work import Work

_SMALLEST_PIECE, _FIRST_PIECE, _LARGEST_PIECE = 256, 512, 16 << 10
_YIELD_S = 0.0003
"""A read that takes longer is the connection's last in this turn of the loop: uvloop would read up
to 32 times from one socket before it looks at others."""
_SHORT_S, _LONG_S = 0.0002, 0.001
"""Pieces of bytes grow and shrink by the time that one takes."""


class Intake:
    """Passes bytes on. 1 KiB may hold dozens of requests, so a turn of the loop stays short.

    Where connections must wait, those go first whose RPCs bring their messages.
    """

    __slots__ = (
        "_goes_last",
        "_handle",
        "_loop",
        "_paused",
        "_piece",
        "_socket",
        "_start",
        "_stopped",
        "_unread",
        "_work",
    )

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        work: Work,
        handle: Callable[[bytes], None],
        start: Callable[[], int],
        goes_last: Callable[[], bool],
    ) -> None:
        """Pass pieces to ``handle``; after the last one ``start`` returns how many RPCs began.

        ``goes_last`` tells `WorkShare` whether others go first.
        """
        self._loop = loop
        self._work = work
        self._handle = handle
        self._start = start
        self._goes_last = goes_last
        self._socket: Any = None
        self._unread = b""
        """Bytes that wait for their turn."""
        self._paused = False
        """It waits: reading is paused."""
        self._piece = _FIRST_PIECE
        self._stopped = False

    def open(self, transport: Any) -> None:
        """Pause and resume ``transport``."""
        self._socket = transport

    def stop(self) -> None:
        """Take nothing more, and forget the connection: without a cycle its memory is free now."""
        self._stopped = True
        self._handle, self._start, self._goes_last = _drop, _none, bool
        self._unread = b""
        self._work.close()

    @property
    def last(self) -> bool:
        """See `Waiting`."""
        return self._goes_last()

    def take(self, data: bytes) -> None:
        """Take bytes from the socket."""
        if self._stopped:
            return
        if self._paused or self._work.share.turn_s <= 0:
            self._unread += data
            self._wait()
        else:
            self._pass_on(data)

    def go_on(self) -> None:
        """See `Waiting`."""
        if self._stopped:
            return
        self._paused = False
        data, self._unread = self._unread, b""
        self._socket.resume_reading()
        self._pass_on(data)

    def _pass_on(self, data: bytes) -> None:
        share = self._work.share
        cpu_s, began_s = time.thread_time(), time.perf_counter()
        at, now_s, until_s = 0, began_s, began_s + share.turn_s
        while at < len(data) and not self._stopped and now_s <= until_s:
            piece = data[at : at + self._piece]
            at += len(piece)
            self._handle(piece)
            then_s, now_s = now_s, time.perf_counter()
            self._adjust(len(piece), now_s - then_s)
        if self._stopped:
            return
        self._unread = data[at:]
        requests = self._start()
        # Not by the clock: what other processes take of the machine is no caller's fault.
        took_s = time.thread_time() - cpu_s
        share.used(took_s)
        pause_s = self._work.took(took_s, requests, self._loop.time())
        if self._unread or pause_s or took_s > _YIELD_S:
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

    def _adjust(self, nbytes: int, took_s: float) -> None:
        if took_s > _LONG_S:
            self._piece = max(_SMALLEST_PIECE, self._piece // 2)
        elif took_s < _SHORT_S and nbytes == self._piece:
            self._piece = min(_LARGEST_PIECE, self._piece * 2)


def _drop(_: bytes) -> None:
    """Stand for the connection that is over."""


def _none() -> int:
    return 0
