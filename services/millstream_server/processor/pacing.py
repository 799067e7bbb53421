"""When a stream's tokens are written: at once, or in batches when the process is busy.

A message to a client takes about 40 µs of CPU, plus 1 µs per token in it. While the process has CPU
time to spare, every token is sent at once. Otherwise the interval between two messages of a stream
grows, up to a limit: latency rises only when the process is at full load.

Full load means, measured every `_PERIOD_S`: the event loop's thread was busy for most of the
period, or the loop woke late (other processes use the cores, which busy time doesn't show). The
interval then grows by half; otherwise it shrinks by a fifth. Both are multiplicative, so that it
settles within half a second. When the process is full while many turns wait for their first token,
the interval becomes its maximum at once: later tokens wait so that first tokens needn't.
"""

from __future__ import annotations

import asyncio
import contextlib
import time

from millstream_server.runtime.telemetry.metrics import PACING_INTERVAL

_PERIOD_S = 0.02
_BUSY = 0.75
_IDLE = 0.6
_LATE_S = 0.004
_FIRST_STEP_S = 0.001
_GROWTH, _DECAY = 1.5, 0.8
_BURST = 8
"""So many turns without a first token are a burst."""


class Pacer:
    """Keeps the current interval; one per process."""

    def __init__(self, max_interval_s: float) -> None:
        """The interval is at most ``max_interval_s``."""
        self.interval_s = 0.0
        self._max_interval_s = max_interval_s
        self.starting = 0
        """Streams that have written nothing yet."""
        self._task: asyncio.Task[None] | None = None

    def open(self) -> None:
        """Start measuring the load; call on the event loop's thread."""
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
        """Make one stream's pacing; ``min_interval_s`` is the client's least interval."""
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
            burst = self.starting >= _BURST
            self.interval_s = self._max_interval_s if burst else min(self._max_interval_s, grown)
        elif busy < _IDLE:
            shrunk = self.interval_s * _DECAY
            self.interval_s = shrunk if shrunk >= _FIRST_STEP_S else 0.0


class PacedStream:
    """One stream's pacing: decides when to write. One `wait` at a time."""

    __slots__ = (
        "_due",
        "_last_s",
        "_loop",
        "_min_interval_s",
        "_pacer",
        "_scheduled",
        "_starting",
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
        self._starting = True
        pacer.starting += 1
        self.longest_interval_s = 0.0

    def touch(self) -> None:
        """Note that there is something to write, due after the interval. Cheap if noted already."""
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
        """Note that there is something to write at once: an end or an error."""
        self._scheduled = True
        self._due.set()

    async def wait(self) -> None:
        """Wait until a write is due; the next interval starts then."""
        await self._due.wait()
        self._due.clear()
        if self._timer:
            self._timer.cancel()
            self._timer = None
        self._scheduled = False
        self._last_s = self._loop.time()
        if self._starting:
            self.close()

    def close(self) -> None:
        """Count it as started, also when it ended without having written anything."""
        if self._starting:
            self._starting = False
            self._pacer.starting -= 1
