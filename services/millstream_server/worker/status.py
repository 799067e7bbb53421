"""What a worker tells of itself: how far its model is loaded, its load, and changes of a value."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

from millstream_server.engines.base import Engine, EngineLoad, Probeable, RankLoad
from millstream_server.engines.load_progress import LoadObserved, LoadProgress, LoadStage
from millstream_server.runtime.telemetry.log import get_log
from millstream_server.worker.open_requests import TokenTotals

log = get_log(__name__)

T = TypeVar("T")


class Watched(Generic[T]):
    """Holds the latest value, None at first. All calls come from one event loop."""

    def __init__(self) -> None:
        """Start without a value."""
        self.value: T | None = None
        self._listeners: set[Callable[[], None]] = set()

    def set(self, value: T) -> None:
        """Replace the value; listeners are called if it differs."""
        if value != self.value:
            self.value = value
            for listener in tuple(self._listeners):
                listener()

    def listen(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call ``listener`` after each change; return the function that removes it."""
        self._listeners.add(listener)
        return lambda: self._listeners.discard(listener)


_POLL_S = 0.25
_LOG_EVERY_POLLS = 20  # 5 s


class ModelLoading:
    """The state of a worker's start. Its numbers never fall; a stage never comes again.

    Order of calls: `following` around the engine's start, `reach` WARMING_UP, `reach` READY; or
    `fail`, at any time before READY.
    """

    def __init__(self, engine: object) -> None:
        """Ask ``engine``, if it is `LoadObserved`."""
        self._engine = engine
        self._began_s = time.monotonic()
        self._ended_s: float | None = None
        self.progress: Watched[LoadProgress] = Watched()
        """How far it is; also when it has failed. Never None."""
        self.progress.set(LoadProgress())
        self.failed: Watched[bool] = Watched()
        """True: it won't become ready."""

    @property
    def now(self) -> LoadProgress:
        """How far it is."""
        return self.progress.value or LoadProgress()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start; of a model that is loaded, how long that took."""
        end_s = time.monotonic() if self._ended_s is None else self._ended_s
        return end_s - self._began_s

    @contextlib.asynccontextmanager
    async def following(self) -> AsyncIterator[None]:
        """Ask the engine 4 times a second during the ``with`` block."""
        self._began_s = time.monotonic()
        polling = asyncio.create_task(self._poll(), name="load-progress")
        try:
            yield
            self._take(self._engine)
        finally:
            polling.cancel()

    def reach(self, stage: LoadStage) -> None:
        """Begin a stage."""
        if stage is LoadStage.READY and self._ended_s is None:
            self._ended_s = time.monotonic()
        self._advance(LoadProgress(stage=stage))

    def fail(self) -> None:
        """Note that the model can't be loaded, or that the process ends before it is."""
        if self._ended_s is None:
            self._ended_s = time.monotonic()
            self.failed.set(True)

    async def _poll(self) -> None:
        polls = 0
        while True:
            self._take(self._engine)
            await asyncio.sleep(_POLL_S)
            polls += 1
            if polls % _LOG_EVERY_POLLS == 0 and (text := self._numbers()):
                log.phase(f"loading the model: {text}, {self.elapsed_s:.0f} s")

    def _take(self, engine: object) -> None:
        if isinstance(engine, LoadObserved):
            self._advance(engine.load_progress())

    def _advance(self, new: LoadProgress) -> None:
        known = self.now
        self.progress.set(
            replace(
                known,
                stage=max(known.stage, new.stage),
                files_done=max(known.files_done, new.files_done),
                files_total=max(known.files_total, new.files_total),
                bytes_done=max(known.bytes_done, new.bytes_done),
                bytes_total=max(known.bytes_total, new.bytes_total),
            )
        )

    def _numbers(self) -> str:
        """Say how much of the weights is read; empty: it isn't known, or all of it."""
        now = self.now
        if now.stage is not LoadStage.LOADING_WEIGHTS or not now.bytes_total:
            return ""
        files = f"{now.files_done} of {now.files_total} files, " if now.files_total else ""
        return f"{files}{now.bytes_done / 1e9:.1f} of {now.bytes_total / 1e9:.1f} GB"


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


class RankSilence:
    """Measures how long each rank has made no progress, to about 0.1 s.

    An idle rank makes none, so its time grows. Once it has work again, its time begins anew: a long
    time of a rank with requests, running or queued, means that it hangs.
    """

    def __init__(self, engine: Probeable, now_s: Callable[[], float] = time.monotonic) -> None:
        """Measure on the clock ``now_s``, in seconds, while there is a `watching` block."""
        self._now_s = now_s
        self._engine = engine
        self._ranks: list[_Rank] = []
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
            self._ranks.append(_Rank(self._engine.progress(dp_rank), self._now_s()))
        self._look()
        now_s = self._now_s()
        for rank, load in zip(self._ranks, ranks, strict=False):
            busy = bool(load.running_requests or load.queued_requests)
            if busy and not rank.busy:
                rank.since_s = now_s
            rank.busy = busy
        return [now_s - rank.since_s for rank in self._ranks]

    async def _sample(self) -> None:
        while True:
            await asyncio.sleep(_SAMPLE_S)
            self._look()

    def _look(self) -> None:
        now_s = self._now_s()
        for dp_rank, rank in enumerate(self._ranks):
            seen = self._engine.progress(dp_rank)
            if seen != rank.seen:
                rank.seen, rank.since_s = seen, now_s


class ReportingEngine(Engine, Probeable, Protocol):
    """An engine as reports need it."""


class LoadReports:
    """What reports are made of. All calls come from one event loop."""

    def __init__(self, engine: ReportingEngine, ended: TokenTotals) -> None:
        """Nothing is asked before `state`; ``ended`` are the tokens of requests that have ended."""
        self._engine = engine
        self._ended = ended
        self.progress = RankSilence(engine)

    async def state(self) -> LoadState:
        """Return the load of now."""
        engine = await self._engine.load()
        return LoadState(engine=engine, tokens=replace(self._ended))


@dataclass(slots=True)
class _Rank:
    seen: int
    since_s: float
    busy: bool = False
