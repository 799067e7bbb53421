"""The canary: notices that an engine hangs, which no process watch and no open port tells.

Each data-parallel rank is watched by itself. Real work that gets on is proof of health: as long as
there is some, nothing is run (`engines.base.Probeable.progress`). After ``interval_s`` of silence a
probe goes in; when ``deadline_s`` more pass in silence, the rank counts as wedged and the worker as
unhealthy. Silence, not the probe's own delay, is what counts: a probe that queues behind a full
batch is no alarm while the batch gets on. From then on a probe is tried every ``retry_s``, until
one comes back or real work gets on.

A hang is noticed within ``interval_s + deadline_s`` and two looks at the engine (``poll_s``) more.

What can look like a hang: one step that takes longer than ``deadline_s``, such as the prefill of a
very long prompt. SGLang's chunks of a prompt count as progress one by one, so it takes a single
chunk that long. Should it happen, new requests go elsewhere until the step is over, which is right
for them; nothing is killed. Raise the deadline where it is common.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from millstream_server.engines.base import Probeable
from millstream_server.worker.engine_metrics import record_canary

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryTimes:
    """When to try and when to give up; a hang is noticed within the sum, and a second."""

    interval_s: float
    """Silence that is tried with a probe. An idle engine runs one so often: a few tokens' work."""
    deadline_s: float
    """Silence that is borne from then on. Longer than any single step of the engine."""
    retry_s: float = 1.0
    """From a failed probe to the next."""

    @property
    def poll_s(self) -> float:
        """How often the engine's progress is looked at."""
        return min(self.interval_s, self.deadline_s, self.retry_s) / 10


class Canary:
    """Watches one engine and calls back when it stops working and when it works again.

    It begins in good health: the warm-up has just passed. ``on_change`` gets False when the first
    rank wedges and True when the last has recovered; it is called on the event loop.
    """

    def __init__(
        self,
        engine: Probeable,
        dp_size: int,
        on_change: Callable[[bool], None],
        times: CanaryTimes,
    ) -> None:
        """Watch ranks 0 to ``dp_size`` - 1 of ``engine`` once `run` is called."""
        self._engine = engine
        self._dp_size = dp_size
        self._on_change = on_change
        self._times = times
        self._wedged: set[int] = set()
        self.probes = 0
        """Probes that were run."""
        self.failures = 0
        """Probes that failed or didn't come back in time."""
        self.last_duration_s: float | None = None
        """How long the last probe took that came back."""

    @property
    def healthy(self) -> bool:
        """Whether every rank works, as far as is known."""
        return not self._wedged

    async def run(self) -> None:
        """Watch until cancelled."""
        async with asyncio.TaskGroup() as group:
            for rank in range(self._dp_size):
                group.create_task(self._watch(rank), name=f"canary-{rank}")

    async def _watch(self, rank: int) -> None:
        times = self._times
        silence = _Silence(self._engine, rank)
        while True:
            await asyncio.sleep(times.poll_s)
            if silence.is_broken():
                self._judge(rank, works=True)
            elif silence.lasts_s >= (times.retry_s if rank in self._wedged else times.interval_s):
                self._judge(rank, works=await self._probe(rank, silence))
                silence.restart()

    async def _probe(self, rank: int, silence: _Silence) -> bool:
        """Run a probe; answers whether it came back before the silence grew too long."""
        self.probes += 1
        began_s = asyncio.get_running_loop().time()
        silence.restart()
        probe = asyncio.create_task(self._engine.probe(rank), name=f"canary-probe-{rank}")
        probe.add_done_callback(_take_exception)
        try:
            while silence.lasts_s < self._times.deadline_s:
                await asyncio.wait({probe}, timeout=self._times.poll_s)
                if probe.done():
                    return self._came_back(rank, probe, began_s)
                silence.is_broken()
        finally:
            # Not awaited: an engine that hangs need not hang its watcher.
            probe.cancel()
        self.failures += 1
        record_canary(rank, None)
        logger.warning("rank=%d canary: nothing for %g s", rank, self._times.deadline_s)
        return False

    def _came_back(self, rank: int, probe: asyncio.Task[None], began_s: float) -> bool:
        error = None if probe.cancelled() else probe.exception()
        if probe.cancelled() or error is not None:
            self.failures += 1
            record_canary(rank, None)
            logger.warning("rank=%d canary failed: %r", rank, error)
            return False
        self.last_duration_s = asyncio.get_running_loop().time() - began_s
        record_canary(rank, self.last_duration_s)
        return True

    def _judge(self, rank: int, *, works: bool) -> None:
        was_healthy = self.healthy
        if works:
            self._wedged.discard(rank)
        else:
            self._wedged.add(rank)
        if self.healthy != was_healthy:
            logger.log(
                logging.INFO if self.healthy else logging.ERROR,
                "rank=%d the engine %s",
                rank,
                "works again" if self.healthy else "hangs",
            )
            self._on_change(self.healthy)


class _Silence:
    """How long one rank has got nothing done."""

    def __init__(self, engine: Probeable, rank: int) -> None:
        self._engine = engine
        self._rank = rank
        self.restart()

    def restart(self) -> None:
        """Begin anew."""
        self._seen = self._engine.progress(self._rank)
        self._since_s = asyncio.get_running_loop().time()

    def is_broken(self) -> bool:
        """Tell whether there was progress since the last look, and begin anew if so."""
        if self._engine.progress(self._rank) == self._seen:
            return False
        self.restart()
        return True

    @property
    def lasts_s(self) -> float:
        """Its length at the last look."""
        return asyncio.get_running_loop().time() - self._since_s


def _take_exception(probe: asyncio.Task[None]) -> None:
    """Keep asyncio from reporting the end of a probe nobody waits for any more."""
    if not probe.cancelled():
        probe.exception()
