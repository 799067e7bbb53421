"""When a stream's tokens are written: at once, or in batches when the process is busy.

A message to a client takes 10 to 40 µs of CPU, by the transport, plus 1 µs per token in it. While
the process has CPU time to spare, every token is sent at once. Otherwise all turns send at the same
times, and the interval between those grows, up to a limit: latency rises only at full load.

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
from collections.abc import Callable

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
        """Turns that have written nothing yet."""
        self._task: asyncio.Task[None] | None = None
        self._later: list[Callable[[], None]] = []
        self._called_s = 0.0
        """When those before them were called."""

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

    def later(self, ready: Callable[[], None]) -> None:
        """Call ``ready`` when the interval since the last such calls is over, with all others."""
        if not self._later:
            loop = asyncio.get_running_loop()
            loop.call_at(self._called_s + self.interval_s, self._call_ready)
        self._later.append(ready)

    def _call_ready(self) -> None:
        later, self._later = self._later, []
        self._called_s = asyncio.get_running_loop().time()
        for ready in later:
            ready()

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
