"""How long the event loop is held in one piece, as a metric, and by what, in the log.

A piece is what runs between two turns of the loop. uvloop tells nobody when it turns, and a
callback in each turn would cost 1 to 2 % of the token path. So a timer beats: every 2 ms while the
loop is busy, more and more seldom while it isn't, since a beat that wakes an idle process takes ten
times as long. What counts is the CPU time of the loop's thread between two beats, garbage
collections taken off, as far as it was spent behind the time for the second beat, and 2 ms before
it. So pieces of a busy loop are measured to 2 ms; of those that hold an idle loop some begin before
that, and are seen too short.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
import time
from types import FrameType
from typing import Any, Self

from millstream_server.runtime.telemetry import metrics
from millstream_server.runtime.telemetry.log import get_log

log = get_log(__name__)

BUSY_S, IDLE_S = 0.002, 0.1
"""Between two beats. One takes 3 µs, and 10 to 100 µs where it wakes the process."""
_TOLD_S = 0.1
"""A piece that takes longer is logged."""
_LOOKS_S = 0.1
"""How often a thread looks whether the loop is held."""
_MOST_FRAMES = 16


class StallWatch:
    """Watches the running event loop: `async with StallWatch() as watch`."""

    def __init__(self, idle_s: float = IDLE_S) -> None:
        """Beat every ``idle_s`` at least; with `BUSY_S` no piece is seen too short."""
        self._idle_s = idle_s
        self._pause_s = BUSY_S
        self._due_s = 0.0
        """The time for the next beat."""
        self.longest_s = 0.0
        """The longest piece yet; who reads it may set it to 0."""
        self._last_ns = 0
        """The loop thread's CPU time at the last beat."""
        self._collected_ns = 0
        """Of garbage collections since then."""
        self._collects_ns: int | None = None
        """When the collection that runs in the loop's thread began."""
        self._timer: asyncio.TimerHandle | None = None
        self._closed = threading.Event()

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._last_ns = time.thread_time_ns()
        gc.callbacks.append(self._collection)
        self._wait()
        if sys.platform == "linux":  # elsewhere no thread can read another's CPU time
            threading.Thread(target=self._look, name="stall-watch", daemon=True).start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._closed.set()
        gc.callbacks.remove(self._collection)
        if self._timer is not None:
            self._timer.cancel()

    def _wait(self) -> None:
        self._due_s = time.monotonic() + self._pause_s
        self._timer = self._loop.call_later(self._pause_s, self._beat)

    def _beat(self) -> None:
        now_ns = time.thread_time_ns()
        used_s, piece_s = self._used_s(now_ns)
        self._last_ns, self._collected_ns = now_ns, 0
        metrics.LOOP_PIECE.observe(piece_s)
        self.longest_s = max(self.longest_s, piece_s)
        busy = used_s > self._pause_s / 2
        self._pause_s = BUSY_S if busy else min(2 * self._pause_s, self._idle_s)
        self._wait()

    def _used_s(self, now_ns: int) -> tuple[float, float]:
        """Return the CPU time since the last beat, and what of it counts as one piece."""
        used_s = (now_ns - self._last_ns - self._collected_ns) * 1e-9
        return used_s, min(used_s, max(time.monotonic() - self._due_s, 0.0) + BUSY_S)

    def _collection(self, phase: str, _info: dict[str, Any]) -> None:
        if threading.get_ident() != self._thread:
            return
        now_ns = time.thread_time_ns()
        if self._collects_ns is None:
            self._collects_ns = now_ns
        else:
            self._collected_ns += now_ns - self._collects_ns
            self._collects_ns = None

    def _look(self) -> None:
        """Log what holds the loop. If it keeps the interpreter's lock, that is when it lets go."""
        clock = time.pthread_getcpuclockid(self._thread)
        told_ns = 0
        while not self._closed.wait(_LOOKS_S):
            last_ns = self._last_ns
            _, held_s = self._used_s(time.clock_gettime_ns(clock))
            if held_s > _TOLD_S and self._collects_ns is None and told_ns != last_ns:
                told_ns = last_ns
                frame = sys._current_frames().get(self._thread)  # noqa: SLF001 - there is no other
                log.warning("the event loop is held", seconds=round(held_s, 2), by=_stack(frame))


def _stack(frame: FrameType | None) -> str:
    """Return where a thread is, the innermost function first."""
    places: list[str] = []
    while frame is not None and len(places) < _MOST_FRAMES:
        module, name = frame.f_globals.get("__name__", "-"), frame.f_code.co_qualname
        places.append(f"{module}.{name}:{frame.f_lineno}")
        frame = frame.f_back
    return " < ".join(places)
