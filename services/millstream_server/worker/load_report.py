"""A worker's load at one moment, as it is reported: the engine's, and what the host counts."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from millstream_server.control.engine import EngineLoad, Probeable, RankLoad
from millstream_server.worker.open_requests import TokenTotals

_SAMPLE_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadState:
    """What a report says, besides the times."""

    engine: EngineLoad
    tokens: TokenTotals

    @property
    def ranks(self) -> Sequence[RankLoad]:
        """The load of each rank; there is at least one."""
        load = self.engine
        return load.ranks or (
            RankLoad(
                running_requests=load.running_requests,
                queued_requests=load.queued_requests,
                used_blocks=load.used_blocks,
                total_blocks=load.total_blocks,
            ),
        )


class Silence:
    """Measures how long one rank has made no progress, as seen by `look`."""

    def __init__(
        self, engine: Probeable, dp_rank: int, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._engine = engine
        self._dp_rank = dp_rank
        self._now_s = now_s
        self.restart()

    def restart(self) -> None:
        """Measure from now on."""
        self._seen = self._engine.progress(self._dp_rank)
        self._since_s = self._now_s()

    def look(self) -> bool:
        """Return whether there was progress since the last look; if so, measure from now on."""
        if self._engine.progress(self._dp_rank) == self._seen:
            return False
        self.restart()
        return True

    @property
    def length_s(self) -> float:
        return self._now_s() - self._since_s


class RankSilence:
    """Measures how long each rank has made no progress, to about 0.1 s.

    An idle rank makes none, so its time grows. Once it has work again, its time begins anew: a long
    time of a rank with requests, running or queued, means that it hangs.
    """

    def __init__(self, engine: Probeable, now_s: Callable[[], float] = time.monotonic) -> None:
        """Measure on the clock ``now_s``, in seconds, while there is a `watching` block."""
        self._now_s = now_s
        self._engine = engine
        self._ranks: list[Silence] = []
        self._busy: list[bool] = []
        self._watchers = 0
        self._sampling: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Read the engine's progress during the ``with`` block."""
        self._watchers += 1
        if self._sampling is None:
            self._sampling = asyncio.create_task(self._sample(), name="rank-progress")
        try:
            yield
        finally:
            self._watchers -= 1
            if not self._watchers:
                self._sampling.cancel()
                self._sampling = None

    def silent_s(self, ranks: Sequence[RankLoad]) -> list[float]:
        """Return each rank's seconds without progress; ``ranks`` are their loads of now."""
        for dp_rank in range(len(self._ranks), len(ranks)):
            self._ranks.append(Silence(self._engine, dp_rank, self._now_s))
            self._busy.append(False)
        for dp_rank, (rank, load) in enumerate(zip(self._ranks, ranks, strict=False)):
            rank.look()
            busy = bool(load.running_requests or load.queued_requests)
            if busy and not self._busy[dp_rank]:
                rank.restart()
            self._busy[dp_rank] = busy
        return [rank.length_s for rank in self._ranks]

    async def _sample(self) -> None:
        while True:
            await asyncio.sleep(_SAMPLE_S)
            for rank in self._ranks:
                rank.look()
