"""When a stream's gathered tokens are written: at once while there is room, in batches when not.

A message to a client costs some 40 µs of CPU whatever is in it, a token in it 1 µs. So while the
process has time to spare every token goes out at once; when it runs out, the interval between two
messages of one stream grows, up to a bound: latency is bought only when no capacity is left.

"Full" is read off two signs, every `_PERIOD_S`: the event loop's thread was busy for most of the
period, or the loop woke late (other processes hold the cores, which busy time doesn't show). The
interval then grows by half, and shrinks by a fifth when the signs are gone: multiplicative both
ways, so that it settles within half a second from either side.
"""

from __future__ import annotations

import asyncio
import contextlib
import time

from millstream_server.runtime.metrics import PACING_INTERVAL

_PERIOD_S = 0.02
_BUSY = 0.75
_IDLE = 0.6
_LATE_S = 0.004
_FIRST_STEP_S = 0.001
_GROWTH, _DECAY = 1.5, 0.8


class Pacer:
    """One per process: the present interval."""

    def __init__(self, max_interval_s: float) -> None:
        """Never hold tokens back longer than ``max_interval_s``."""
        self.interval_s = 0.0
        self._max_interval_s = max_interval_s
        self._task: asyncio.Task[None] | None = None

    def open(self) -> None:
        """Start watching the load; call on the event loop's thread."""
        self._task = asyncio.ensure_future(self._watch())
        PACING_INTERVAL.set_function(lambda: self.interval_s)

    async def close(self) -> None:
        """Stop."""
        if self._task:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        PACING_INTERVAL.set_function(float)

    def stream(self, min_interval_s: float = 0.0) -> PacedStream:
        """Pace one stream whose client asked for at least ``min_interval_s`` between messages."""
        return PacedStream(self, min_interval_s)

    async def _watch(self) -> None:
        while True:
            wall, busy = time.perf_counter(), time.thread_time()
            await asyncio.sleep(_PERIOD_S)
            elapsed = time.perf_counter() - wall
            self._adjust((time.thread_time() - busy) / elapsed, elapsed - _PERIOD_S)

    def _adjust(self, busy: float, late_s: float) -> None:
        if busy > _BUSY or late_s > _LATE_S:
            grown = max(_FIRST_STEP_S, self.interval_s * _GROWTH)
            self.interval_s = min(self._max_interval_s, grown)
        elif busy < _IDLE:
            shrunk = self.interval_s * _DECAY
            self.interval_s = shrunk if shrunk >= _FIRST_STEP_S else 0.0


class PacedStream:
    """Tells one stream's writer when to write. One `wait` at a time."""

    __slots__ = (
        "_due",
        "_last_s",
        "_loop",
        "_min_interval_s",
        "_pacer",
        "_scheduled",
        "_timer",
        "longest_interval_s",
    )

    def __init__(self, pacer: Pacer, min_interval_s: float) -> None:
        """Start with nothing written: the first `touch` is due at once."""
        self._pacer = pacer
        self._min_interval_s = min_interval_s
        self._loop = asyncio.get_running_loop()
        self._due = asyncio.Event()
        self._last_s = 0.0
        self._scheduled = False
        self._timer: asyncio.TimerHandle | None = None
        self.longest_interval_s = 0.0

    def touch(self) -> None:
        """There is something to write; it will be due in time. Cheap when called again."""
        if self._scheduled:
            return
        self._scheduled = True
        interval_s = max(self._min_interval_s, self._pacer.interval_s)
        if not interval_s or not self._last_s:
            self._due.set()
            return
        wait_s = self._last_s + interval_s - self._loop.time()
        if wait_s <= 0:
            self._due.set()
        else:
            self.longest_interval_s = max(self.longest_interval_s, interval_s)
            self._timer = self._loop.call_later(wait_s, self._due.set)

    def urge(self) -> None:
        """There is something that must not wait: an end or an error."""
        self._scheduled = True
        self._due.set()

    async def wait(self) -> None:
        """Wait until something is due; it counts as written from then on."""
        await self._due.wait()
        self._due.clear()
        if self._timer:
            self._timer.cancel()
            self._timer = None
        self._scheduled = False
        self._last_s = self._loop.time()
