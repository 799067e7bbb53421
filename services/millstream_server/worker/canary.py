"""The canary: detects that an engine hangs, though its process runs and its port is open.

Each data-parallel rank is watched separately. While requests make progress
(`control.engine.Probeable.progress`), no probe is run. After ``interval_s`` without progress a
probe is run; after ``deadline_s`` more without progress the rank counts as hung and the worker as
unhealthy. The probe's own delay doesn't count: it may queue behind a full batch that makes
progress. A hung rank gets a probe every ``retry_s``, until one succeeds or requests make progress.

A hang is detected within ``interval_s + deadline_s`` and two polls (``poll_s``) more.

A single step longer than ``deadline_s`` looks like a hang, such as the prefill of a very long chunk
of a prompt (each of SGLang's chunks counts as progress). New requests then go to other workers
until the step is over; nothing is killed. Increase the deadline where that is common.

While an operator has paused the engine, has released its memory or changes it, there is no progress
and nothing is wrong: no probe is run, and one that was begun before is given up without a result.

`EngineWatch` acts on it: the health condition "stuck", and failing a worker that stays
stuck.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass

from millstream_server.control.engine import Probeable
from millstream_server.runtime.drain import OpenWork
from millstream_server.runtime.errors import EngineFailedError, ServingError, WorkerPausedError
from millstream_server.runtime.lifecycle.conditions import STUCK, HealthConditions
from millstream_server.runtime.telemetry.log import get_log
from millstream_server.worker.engine_metrics import record_canary
from millstream_server.worker.load_report import Silence

log = get_log(__name__)


class ExpectedSilence:
    """Tells the canary when not to probe; tells operations when no probe runs.

    All calls come from one event loop.
    """

    def __init__(self) -> None:
        self.expected: Callable[[], bool] = lambda: False
        """Returns whether the engine makes no progress because an operator wanted that."""
        self.probes = OpenWork()
        """Counts the canary's probes in the engine."""
        self._held_off = 0

    @property
    def probes_wanted(self) -> bool:
        return not (self._held_off or self.expected())

    @contextlib.contextmanager
    def without_new_probes(self) -> Iterator[None]:
        """Have the canary run no new probe during a ``with`` block."""
        self._held_off += 1
        try:
            yield
        finally:
            self._held_off -= 1

    async def until_no_probe(self) -> None:
        """Wait until no probe is in the engine, which takes as long as the canary gives it.

        There is none until the caller waits for something else.
        """
        with self.without_new_probes():
            await self.probes.until_idle(None)


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryTimes:
    """When to probe, and when a rank counts as hung. All in seconds."""

    interval_s: float
    """Time without progress before a probe: an idle engine generates a few tokens that often."""
    deadline_s: float
    """Further time without progress before the rank counts as hung; longer than any step."""
    retry_s: float = 1.0
    """Time from a failed probe to the next."""

    @property
    def poll_s(self) -> float:
        return min(self.interval_s, self.deadline_s, self.retry_s) / 10


class Canary:
    """Watches one engine; calls back when it hangs and when it works again.

    It starts as healthy, after the warm-up. ``on_change`` is called with False when the first rank
    hangs and with True when the last one has recovered; on the event loop.
    """

    def __init__(
        self,
        engine: Probeable,
        dp_size: int,
        on_change: Callable[[bool], None],
        times: CanaryTimes,
        expected_silence: ExpectedSilence,
    ) -> None:
        """Prepare to watch ranks 0 to ``dp_size`` - 1 of ``engine``; `run` starts."""
        self._engine = engine
        self._dp_size = dp_size
        self._on_change = on_change
        self._times = times
        self._silence = expected_silence
        self._hung: set[int] = set()
        self.probes = 0
        self.failures = 0
        """Number of probes that failed or didn't end in time."""
        self.last_duration_s: float | None = None
        """Duration of the last probe that succeeded, in seconds."""

    @property
    def healthy(self) -> bool:
        return not self._hung

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for rank in range(self._dp_size):
                group.create_task(self._watch(rank), name=f"canary-{rank}")

    async def _watch(self, rank: int) -> None:
        times = self._times
        silence = Silence(self._engine, rank)
        while True:
            await asyncio.sleep(times.poll_s)
            if not self._silence.probes_wanted:
                silence.restart()
            elif silence.look():
                self._set_working(rank, works=True)
            elif silence.length_s >= (times.retry_s if rank in self._hung else times.interval_s):
                works = await self._probe(rank, silence)
                if works is not None:
                    self._set_working(rank, works=works)
                silence.restart()

    async def _probe(self, rank: int, silence: Silence) -> bool | None:
        """Run a probe; return whether it succeeded before ``deadline_s`` without progress.

        None: it was given up, because silence is expected now.
        """
        self.probes += 1
        began_s = asyncio.get_running_loop().time()
        silence.restart()
        probe = asyncio.create_task(self._engine.probe(rank), name=f"canary-probe-{rank}")
        self._silence.probes.begin()
        probe.add_done_callback(self._probe_ended)
        try:
            while silence.length_s < self._times.deadline_s:
                await asyncio.wait({probe}, timeout=self._times.poll_s)
                if self._silence.expected() or _was_paused(probe):
                    return None
                if probe.done():
                    return self._record_result(rank, probe, began_s)
                silence.look()
        finally:
            # Not awaited: an engine that hangs must not block the canary.
            probe.cancel()
        self.failures += 1
        record_canary(rank, None)
        log.warning("canary without progress", rank=rank, silent_s=self._times.deadline_s)
        return False

    def _probe_ended(self, probe: asyncio.Task[None]) -> None:
        self._silence.probes.end()
        if not probe.cancelled():
            probe.exception()  # taken, for asyncio reports it of a probe that is no longer awaited

    def _record_result(self, rank: int, probe: asyncio.Task[None], began_s: float) -> bool:
        error = None if probe.cancelled() else probe.exception()
        if probe.cancelled() or error is not None:
            self.failures += 1
            record_canary(rank, None)
            log.warning("canary failed", rank=rank, reason=repr(error))
            return False
        self.last_duration_s = asyncio.get_running_loop().time() - began_s
        record_canary(rank, self.last_duration_s)
        return True

    def _set_working(self, rank: int, *, works: bool) -> None:
        was_healthy = self.healthy
        if works:
            self._hung.discard(rank)
        else:
            self._hung.add(rank)
        if self.healthy != was_healthy:
            if self.healthy:
                log.info("the engine works again", rank=rank)
            else:
                log.error("the engine hangs", rank=rank)
            self._on_change(self.healthy)


def _was_paused(probe: asyncio.Task[None]) -> bool:
    """Return whether an operator's pause ended the probe, perhaps one that is over already."""
    ended = probe.done() and not probe.cancelled()
    return ended and isinstance(probe.exception(), WorkerPausedError)


class EngineWatch:
    """Owns the condition `STUCK`: it holds while the canary reports that the engine hangs.

    An engine that stays stuck for ``stuck_limit_s`` (0: no limit) is reported as failed. So is one
    whose canary ends by itself, since a hang would not be detected any more.
    """

    def __init__(
        self,
        conditions: HealthConditions,
        stuck_limit_s: float,
        on_failure: Callable[[ServingError], None],
        expected_silence: ExpectedSilence,
    ) -> None:
        """Add the condition; ``on_failure`` is called when the engine counts as failed."""
        self._conditions = conditions
        self._stuck = conditions.own(STUCK)
        self._stuck_limit_s = stuck_limit_s
        self._on_failure = on_failure
        self._silence = expected_silence
        self._giving_up: asyncio.TimerHandle | None = None

    @contextlib.asynccontextmanager
    async def watching(
        self, engine: Probeable, dp_size: int, times: CanaryTimes
    ) -> AsyncIterator[None]:
        """Run the canary during the ``with`` block; with an interval of 0 run none."""
        if not times.interval_s:
            yield
            return
        canary = Canary(engine, dp_size, self._changed, times, self._silence)
        running = asyncio.ensure_future(canary.run())
        running.add_done_callback(self._ended)
        try:
            yield
        finally:
            running.cancel()
            self._keep()

    def _changed(self, healthy: bool) -> None:  # noqa: FBT001 - the canary's callback
        self._stuck.set(holds=not healthy)
        self._keep()
        if not healthy:
            log.phase("stuck: the engine makes no progress")
            if self._stuck_limit_s:
                self._wait()
        elif self._conditions.serving:
            log.phase("serving")

    def _wait(self) -> None:
        loop = asyncio.get_running_loop()
        self._giving_up = loop.call_later(self._stuck_limit_s, self._give_up)

    def _keep(self) -> None:
        if self._giving_up is not None:
            self._giving_up.cancel()
            self._giving_up = None

    def _give_up(self) -> None:
        if self._silence.expected():  # whether it is stuck isn't known now
            self._wait()
        else:
            self._on_failure(EngineFailedError(f"it was stuck for {self._stuck_limit_s:g} s"))

    def _ended(self, running: asyncio.Task[None]) -> None:
        if running.cancelled():
            return
        log.error("the canary failed", error=running.exception())
        self._on_failure(EngineFailedError("its canary failed, so a hang would not be detected"))
