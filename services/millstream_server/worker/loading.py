"""How far this worker's model is loaded; a value that others follow."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Generic, TypeVar

from millstream_server.control.engine import LoadObserved, LoadProgress, LoadStage
from millstream_server.runtime.telemetry.log import get_log
from millstream_server.runtime.telemetry.metrics import MODEL_LOAD

log = get_log(__name__)

T = TypeVar("T")


class Watched(Generic[T]):
    """Holds the latest value. All calls come from one event loop."""

    def __init__(self, value: T) -> None:
        self.value = value
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
        self._began_s = self._stage_began_s = time.monotonic()
        self._ended_s: float | None = None
        self.progress = Watched(LoadProgress())
        """How far it is; also when it has failed."""
        self.failed = Watched(value=False)
        """True: it won't become ready."""

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start; of a model that is loaded, how long that took."""
        end_s = time.monotonic() if self._ended_s is None else self._ended_s
        return end_s - self._began_s

    @contextlib.asynccontextmanager
    async def following(self) -> AsyncIterator[None]:
        """Ask the engine 4 times a second during the ``with`` block."""
        self._began_s = self._stage_began_s = time.monotonic()
        polling = asyncio.create_task(self._poll(), name="load-progress")
        try:
            yield
            self._take(self._engine)
        finally:
            polling.cancel()

    def reach(self, stage: LoadStage) -> None:
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
        known = self.progress.value
        if new.stage > known.stage:
            began_s, self._stage_began_s = self._stage_began_s, time.monotonic()
            MODEL_LOAD.labels(known.stage.name.lower()).set(self._stage_began_s - began_s)
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
        now = self.progress.value
        if now.stage is not LoadStage.LOADING_WEIGHTS or not now.bytes_total:
            return ""
        files = f"{now.files_done} of {now.files_total} files, " if now.files_total else ""
        return f"{files}{now.bytes_done / 1e9:.1f} of {now.bytes_total / 1e9:.1f} GB"
