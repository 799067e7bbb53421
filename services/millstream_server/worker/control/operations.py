"""What all operations share: one at a time, which of them the engine has, out of service and back.

Until an operation begins to change the engine it can be interrupted, by its caller who goes away,
by a shutdown or by another operation; it then undoes what it did. From then on it goes to its end.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import itertools
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from millstream_server.control.operations import EngineControls
from millstream_server.runtime.drain import OpenWork
from millstream_server.runtime.errors import (
    DeadlinePassedError,
    EngineBusyError,
    InvalidRequestError,
    InvalidWeightsError,
    OperationConflictError,
    ServingError,
    UnavailableError,
    UnsupportedFeatureError,
    WorkerDrainingError,
)
from millstream_server.runtime.lifecycle.conditions import HealthCondition, HealthConditions
from millstream_server.worker.canary import ExpectedSilence

T = TypeVar("T")


class OperationStage(enum.Enum):
    """How far an operation is; the names are the contract's."""

    CHECKING = "checking"
    DRAINING = "draining"
    APPLYING = "applying"
    DONE = "done"


class OperationReport:
    """Follows one operation for its caller, from now on."""

    def __init__(self, open_requests: Callable[[], int] = lambda: 0) -> None:
        self.changed = asyncio.Event()
        """Set at each change of the stage."""
        self.open_requests = open_requests
        self.began_s = time.monotonic()
        self.stage = OperationStage.CHECKING
        self.bytes = (0, 0)
        """Received or checked, and in all (0: not known)."""

    def enter(self, stage: OperationStage) -> None:
        self.stage = stage
        self.changed.set()

    def count(self, done: int, total: int) -> None:
        """Set the bytes; called from any thread."""
        self.bytes = (done, total)


class Operation:
    """One operation that runs; made by `Operations.one`."""

    def __init__(self, name: str, report: OperationReport, busy: OpenWork) -> None:
        """Belong to the current task."""
        self.name = name
        self.report = report
        self.failure: ServingError | None = None
        """Why it was interrupted; None: it wasn't, or its caller has gone."""
        self.changing_since_s: float | None = None
        """Since when it changes the engine, on the clock of `time.monotonic`."""
        self._busy = busy
        self.task = asyncio.current_task()
        self._change: asyncio.Task[Any] | None = None

    def interrupt(self, failure: ServingError) -> None:
        """End it with ``failure``; no effect once it changes the engine."""
        if self.changing_since_s is None and self.failure is None and self.task is not None:
            self.failure = failure
            self.task.cancel()

    def cut(self, failure: ServingError) -> None:
        """End it with ``failure``, whatever it does."""
        self.interrupt(failure)
        if self._change is not None and not self._change.done():
            self.failure = failure
            self._change.cancel()

    async def apply(self, change: Coroutine[Any, Any, T]) -> T:
        """Run what changes the engine to its end, also if the caller goes away meanwhile.

        A shutdown waits for it.
        """
        self.changing_since_s = time.monotonic()
        self.report.enter(OperationStage.APPLYING)
        running = asyncio.create_task(change)
        self._change = running
        with self._busy.track():
            return await to_its_end(running)


async def to_its_end(running: asyncio.Task[T]) -> T:
    """Wait for a task's end and return its result, however often the caller is cancelled."""
    while not running.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait({running})
    return running.result()


class Operations:
    """Lets one operation run at a time. All calls come from one event loop."""

    def __init__(self) -> None:
        self.busy = OpenWork()
        """Counts the operations that change the engine."""
        self._running: list[Operation] = []
        self._leaving = False

    @property
    def current(self) -> str:
        """Name of the operation that runs; empty: none."""
        return self._running[0].name if self._running else ""

    @property
    def changing_s(self) -> float | None:
        """How long an operation has been changing the engine; None: none does."""
        times = [o.changing_since_s for o in self._running if o.changing_since_s is not None]
        return time.monotonic() - min(times) if times else None

    @contextlib.contextmanager
    def one(
        self, name: str, report: OperationReport | None = None, *, together: bool = False
    ) -> Iterator[Operation]:
        """Run an operation in a ``with`` block of a task of its own.

        ``together``: several of that name may run at once.

        Raises:
            OperationConflictError: another one runs.
            WorkerDrainingError: the worker is shutting down.
            ServingError: the operation was interrupted by this.
        """
        if self._leaving:
            raise _shutting_down()
        if self._running and not (together and self.current == name):
            raise OperationConflictError(
                f"{self.current} runs on this worker's engine; wait until it has ended"
            )
        operation = Operation(name, report or OperationReport(), self.busy)
        self._running.append(operation)
        try:
            yield operation
        except asyncio.CancelledError:
            if operation.failure is None:
                raise
            if operation.task is not None:
                operation.task.uncancel()  # it ends with an error, but its caller is there
            raise operation.failure from None
        finally:
            self._running.remove(operation)

    def interrupt(self, name: str, failure: ServingError) -> None:
        for operation in [o for o in self._running if o.name == name]:
            # Each its own: one exception can't be raised through two RPCs at the same time.
            operation.interrupt(type(failure)(failure.message))

    def leave(self) -> None:
        """Interrupt what can be, and let none begin: the worker is shutting down."""
        self._leaving = True
        for operation in list(self._running):
            operation.interrupt(_shutting_down())

    def cut(self) -> None:
        """End what still runs: the engine is about to be closed."""
        self._leaving = True
        for operation in list(self._running):
            operation.cut(UnavailableError("the worker had to stop before this was done"))


def _shutting_down() -> WorkerDrainingError:
    return WorkerDrainingError("this worker is shutting down; nothing was changed")


REFUSALS = (InvalidRequestError, InvalidWeightsError, EngineBusyError, OperationConflictError)
"""An engine that raises one of these has not been changed."""
_CONTROLS = {
    "pause": ("pause", ("Pause", "Continue")),
    "memory": ("release memory", ("ReleaseMemory", "ResumeMemory")),
    "weights": ("replace its weights", ("UpdateWeights",)),
    "cache": ("empty its prefix cache", ("FlushCache",)),
    "profile": ("record profiles", ("StartProfile", "StopProfile")),
    "adapters": ("load LoRA adapters", ("LoadLora", "UnloadLora", "ListLoras")),
}
"""By a field of `EngineControls`: what the engine can do with it, and the RPCs that need it."""
_WHAT = {name: what for what, names in _CONTROLS.values() for name in names}


class SupportedControls:
    """The controls of an engine that has started."""

    def __init__(self, controls: Callable[[], EngineControls], ready: Callable[[], object]) -> None:
        """``ready`` raises `UnavailableError` while the model is being loaded."""
        self._controls = controls
        self._ready = ready

    def require(self, operation: str, part: Callable[[EngineControls], T | None]) -> T:
        """Return the part of the engine's controls that an operation needs.

        Raises:
            UnsupportedFeatureError: the engine doesn't have it.
            UnavailableError: the model is being loaded.
        """
        self._ready()
        found = part(self._controls())
        if found is None:
            raise UnsupportedFeatureError(
                f"{operation}: this worker's engine can't {_WHAT[operation]}, at least not with "
                "the settings it was started with"
            )
        return found

    def names(self) -> tuple[str, ...]:
        """Return the operations that the engine has, by the names of their RPCs."""
        controls = self._controls()
        has = [names for part, (_, names) in _CONTROLS.items() if getattr(controls, part)]
        return tuple(itertools.chain(("Drain", "Undrain"), *has))


class Cause(enum.Enum):
    """Why a worker is out of service; the values are its health conditions."""

    DRAINED = "drained"
    PAUSED = "paused"
    MEMORY = "memory released"
    WEIGHTS = "updating weights"
    CACHE = "flushing cache"


class ServiceStop:
    """Out of service while any cause holds. All calls come from one event loop."""

    def __init__(
        self,
        work: OpenWork,
        silence: ExpectedSilence,
        conditions: HealthConditions,
        propagation_s: float,
    ) -> None:
        """Refuse new requests in ``work``; add a health condition for each cause."""
        self._work = work
        self._silence = silence
        self._propagation_s = propagation_s
        self._conditions: dict[Cause, HealthCondition] = {
            cause: conditions.own(cause.value) for cause in Cause
        }
        self._timer: asyncio.TimerHandle | None = None
        self._refusing = asyncio.Event()

    def holds(self, cause: Cause) -> bool:
        return self._conditions[cause].holds

    @property
    def open_requests(self) -> int:
        """Open requests and, in workers that encode, results that are still to be fetched."""
        return self._work.count

    def take_out(self, cause: Cause, *, at_once: bool = False) -> None:
        """Take the worker out of service; no effect if it is for this cause.

        ``at_once``: new requests are refused now, not only after the propagation.
        """
        self._conditions[cause].set()
        if at_once:
            self._refuse()
        elif self._timer is None and not self._refusing.is_set():
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._propagation_s, self._refuse)

    def put_back(self, cause: Cause) -> None:
        """Clear a cause; without any the worker is back in service."""
        if not any(c.holds for name, c in self._conditions.items() if name is not cause):
            self._cancel_timer()
            self._refusing.clear()
            self._work.paused = False
        self._conditions[cause].clear()  # last: health must not be SERVING while it refuses

    @contextlib.contextmanager
    def out_for(self, cause: Cause) -> Iterator[None]:
        self.take_out(cause)
        try:
            yield
        finally:
            self.put_back(cause)

    async def until_idle(self, limit_s: float | None, *, for_engine: bool = True) -> None:
        """Wait until new requests are refused and no request is open.

        ``limit_s`` counts from the refusals on; None: no limit. ``for_engine``: a paused engine
        would never be idle while requests are open, so don't wait for it.

        Raises:
            DeadlinePassedError: requests are still open.
            OperationConflictError: they are paused.
        """
        if for_engine:
            self._check_not_paused()
        await self._refusing.wait()
        if for_engine:
            self._check_not_paused()
        if not await self._work.until_idle(limit_s):
            raise DeadlinePassedError(
                f"requests still open after {limit_s:g} s: {self._work.count}; give a longer "
                "timeout"
            )
        if for_engine:
            await self.until_no_probe()

    async def until_no_probe(self) -> None:
        """Wait until no probe of the canary is in the engine, which must not change with one.

        It stays so if the caller then changes the engine without waiting for anything else.
        """
        await self._silence.until_no_probe()

    def check_has_memory(self) -> None:
        """Check that no memory of the engine is released.

        Raises:
            OperationConflictError: some is.
        """
        if self.holds(Cause.MEMORY):
            raise OperationConflictError(
                "memory of the engine is released; call ResumeMemory first"
            )

    def _check_not_paused(self) -> None:
        if self.holds(Cause.PAUSED) and self._work.count:
            raise OperationConflictError(
                "the engine is paused, and this would wait for its open requests "
                f"({self._work.count}); call Continue first"
            )

    def _refuse(self) -> None:
        self._cancel_timer()
        self._work.paused = True
        self._refusing.set()

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


@dataclass(slots=True, eq=False)
class OperationKind:
    """Operations of one kind; what all kinds share is made by `ControlCore`.

    Besides what it says itself, each raises UnsupportedFeatureError if the engine can't do it,
    UnavailableError while the model is being loaded, and OperationConflictError while another
    operation runs, unless it says otherwise.
    """

    operations: Operations
    stop: ServiceStop
    controls: SupportedControls
