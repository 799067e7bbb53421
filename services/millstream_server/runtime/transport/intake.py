"""How one connection's bytes are taken: in pieces and with pauses, so that they hold up nobody."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from millstream_server.runtime.transport.work import TURN_S, Work

_SMALLEST_PIECE, _LARGEST_PIECE = 1 << 10, 16 << 10
_YIELD_S = 0.0003
"""A read that takes longer is the connection's last in this turn of the loop: uvloop would read up
to 32 times from one socket before it looks at others."""
_SHORT_S, _LONG_S = 0.0002, 0.001
"""Pieces of bytes grow and shrink by the time that one takes."""


class Intake:
    """Passes bytes on. 1 KiB may hold dozens of requests, so a turn of the loop stays short."""

    __slots__ = ("_handle", "_loop", "_piece", "_socket", "_start", "_stopped", "_unread", "_work")

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        work: Work,
        handle: Callable[[bytes], None],
        start: Callable[[], int],
    ) -> None:
        """Pass pieces to ``handle``; after the last one ``start`` returns how many RPCs began."""
        self._loop = loop
        self._work = work
        self._handle = handle
        self._start = start
        self._socket: Any = None
        self._unread = b""
        """Bytes that wait for their turn; reading is paused then."""
        self._piece = _SMALLEST_PIECE
        self._stopped = False

    def open(self, transport: Any) -> None:
        """Pause and resume ``transport``."""
        self._socket = transport

    def stop(self) -> None:
        """Take nothing more, and forget the connection: without a cycle its memory is free now."""
        self._stopped = True
        self._handle, self._start = _drop, _none
        self._unread = b""
        self._work.close()

    def take(self, data: bytes) -> None:
        """Take bytes from the socket."""
        if self._stopped:
            return
        if self._unread:
            self._unread += data  # it came before the pause took effect
            return
        cpu_s, began_s = time.thread_time(), time.perf_counter()
        at, now_s, until_s = 0, began_s, began_s + self._work.share.turn_s
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
        pause_s = self._work.took(took_s, requests, self._loop.time())
        if took_s > _YIELD_S:
            share = self._work.share
            if share.turn_s == TURN_S:
                self._loop.call_soon(share.new_turn)
            share.turn_s = max(0.0, share.turn_s - took_s)
        if self._unread or pause_s or took_s > _YIELD_S:
            self._socket.pause_reading()
            self._loop.call_later(pause_s, self._go_on)

    def _adjust(self, nbytes: int, took_s: float) -> None:
        if took_s > _LONG_S:
            self._piece = max(_SMALLEST_PIECE, self._piece // 2)
        elif took_s < _SHORT_S and nbytes == self._piece:
            self._piece = min(_LARGEST_PIECE, self._piece * 2)

    def _go_on(self) -> None:
        """Read on after a pause."""
        if self._stopped:
            return
        data, self._unread = self._unread, b""
        self._socket.resume_reading()
        if data:
            self.take(data)


def _drop(_: bytes) -> None:
    """Stand for the connection that is over."""


def _none() -> int:
    return 0
