"""When a stream's tokens are written: at once, or in batches when the process is busy.

A message to a client takes 10 to 40 µs of CPU, by the transport, plus 1 µs per token in it. While
the process has CPU time to spare, every token is sent at once. Otherwise the interval between two
messages of a stream grows, up to a limit: latency rises only when the process is at full load.

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
        """Streams that have written nothing yet."""
        self._task: asyncio.Task[None] | None = None
        self._due: list[PacedStream] = []
        """Streams whose outlets send in the next turn of the event loop."""

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

    def due(self, stream: PacedStream) -> None:
        """Let the stream's outlet send soon: once for all that become due in a turn of the loop."""
        if not self._due:
            asyncio.get_running_loop().call_soon(self._send_due)
        self._due.append(stream)

    def _send_due(self) -> None:
        due, self._due = self._due, []
        now_s = asyncio.get_running_loop().time()
        for stream in due:
            stream.send(now_s)

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
    """One stream's pacing: decides when to write. One `wait` at a time.

    While a `wait` is in progress, what is due is first offered to the stream's outlet, if it has
    one; `wait` goes on until the outlet can't send it.
    """

    __slots__ = (
        "_due",
        "_fault",
        "_last_s",
        "_loop",
        "_min_interval_s",
        "_outlet",
        "_pacer",
        "_scheduled",
        "_starting",
        "_timer",
        "_waits",
        "gathers",
        "longest_interval_s",
    )

    def __init__(self, pacer: Pacer, min_interval_s: float) -> None:
        """Start with nothing written: the first `touch` is due at once."""
        self._pacer = pacer
        self._min_interval_s = min_interval_s
        self._loop = asyncio.get_running_loop()
        self._due = asyncio.Event()
        self._outlet: Callable[[], bool] | None = None
        self._fault: Exception | None = None
        self._last_s = 0.0
        self._scheduled = False
        self._timer: asyncio.TimerHandle | None = None
        self._starting = True
        pacer.starting += 1
        self._waits = False
        self.longest_interval_s = 0.0
        self.gathers = True
        """Nobody waits to write, or the client has asked for intervals: output may gather long."""

    def send_through(self, outlet: Callable[[], bool]) -> None:
        """Offer what is due to ``outlet``; it returns False for what `wait` is to return for.

        An exception that it raises is raised by `wait`, and ends nothing else.
        """
        self._outlet = outlet

    def touch(self) -> None:
        """Note that there is something to write, due after the interval. Cheap if noted already."""
        if self._scheduled:
            return
        self._scheduled = True
        interval_s = max(self._min_interval_s, self._pacer.interval_s)
        if not interval_s or not self._last_s:
            self._fall_due()
            return
        wait_s = self._last_s + interval_s - self._loop.time()
        if wait_s <= 0:
            self._fall_due()
        else:
            self.longest_interval_s = max(self.longest_interval_s, interval_s)
            self._timer = self._loop.call_later(wait_s, self._fall_due)

    def urge(self) -> None:
        """Note that there is something to write at once: an end or an error. `wait` returns."""
        self._scheduled = True
        self._due.set()

    async def wait(self) -> None:
        """Wait until a write is due; the next interval starts then."""
        self.gathers = self._min_interval_s > 0
        self._waits = True
        try:
            await self._due.wait()
        finally:
            self._waits = False
            self.gathers = True
        self._due.clear()
        self._begin_interval(self._loop.time())
        if self._fault is not None:
            raise self._fault

    def send(self, now_s: float) -> None:
        """Let the outlet send; if it can't, let `wait` return."""
        if self._outlet is None or not self._waits or self._due.is_set():
            self._due.set()
            return
        self._begin_interval(now_s)
        try:
            sent = self._outlet()
        except Exception as fault:  # noqa: BLE001 - one stream's failure must not end the others
            self._fault = fault
            sent = False
        if not sent:
            self.urge()

    def _fall_due(self) -> None:
        if self._waits and self._outlet is not None:
            self._pacer.due(self)
        else:
            self._due.set()

    def _begin_interval(self, now_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._scheduled = False
        self._last_s = now_s
        if self._starting:
            self._count_started()

    def close(self) -> None:
        """Forget the outlet; count it as started, also when it has written nothing."""
        self._outlet = None
        self._count_started()

    def _count_started(self) -> None:
        if self._starting:
            self._starting = False
            self._pacer.starting -= 1
