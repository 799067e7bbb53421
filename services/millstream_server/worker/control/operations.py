"""One operation at a time: its stages, what interrupts it, and from when on nothing does.

Until an operation begins to change the engine it can be interrupted, by its caller who goes away,
by a shutdown or by another operation; it then undoes what it did. From then on it goes to its end.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from millstream_server.runtime.errors import (
    OperationConflictError,
    ServingError,
    UnavailableError,
    WorkerDrainingError,
)
from millstream_server.runtime.lifecycle.drain import OpenWork

T = TypeVar("T")


class Stage(enum.Enum):
    """How far an operation is; the names are the contract's."""

    CHECKING = "checking"
    DRAINING = "draining"
    APPLYING = "applying"
    DONE = "done"


@dataclass(frozen=True, slots=True)
class Progress:
    """How far an operation is, at one time."""

    stage: Stage
    open_requests: int
    bytes_done: int
    bytes_total: int
    elapsed_s: float


class Report:
    """Follows one operation for its caller."""

    def __init__(self, open_requests: Callable[[], int] = lambda: 0) -> None:
        """Begin now."""
        self.changed = asyncio.Event()
        """Set at each change of the stage."""
        self._open_requests = open_requests
        self._began_s = time.monotonic()
        self._stage = Stage.CHECKING
        self._bytes = (0, 0)

    def enter(self, stage: Stage) -> None:
        """Set the stage."""
        self._stage = stage
        self.changed.set()

    def count(self, done: int, total: int) -> None:
        """Set the bytes that were received or checked; called from any thread."""
        self._bytes = (done, total)

    def progress(self) -> Progress:
        """Return how far it is now."""
        elapsed_s = time.monotonic() - self._began_s
        return Progress(self._stage, self._open_requests(), *self._bytes, elapsed_s)


class Operation:
    """One operation that runs; made by `Operations.one`."""

    def __init__(self, name: str, report: Report, busy: OpenWork) -> None:
        """Belong to the current task."""
        self.name = name
        self.report = report
        self.failure: ServingError | None = None
        """Why it was interrupted; None: it wasn't, or its caller has gone."""
        self.changing_since_s: float | None = None
        """Since when it changes the engine, on the clock of `time.monotonic`."""
        self._busy = busy
        self._task = asyncio.current_task()
        self._change: asyncio.Task[Any] | None = None

    def interrupt(self, failure: ServingError) -> None:
        """End it with ``failure``; no effect once it changes the engine."""
        if self.changing_since_s is None and self.failure is None and self._task is not None:
            self.failure = failure
            self._task.cancel()

    def uncancel(self) -> None:
        """Take an interruption back: its task ends with an error, but its caller is there."""
        if self._task is not None:
            self._task.uncancel()

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
        self.report.enter(Stage.APPLYING)
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
        """Run none."""
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
        self, name: str, report: Report | None = None, *, together: bool = False
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
        operation = Operation(name, report or Report(), self.busy)
        self._running.append(operation)
        try:
            yield operation
        except asyncio.CancelledError:
            if operation.failure is None:
                raise
            operation.uncancel()
            raise operation.failure from None
        finally:
            self._running.remove(operation)

    def interrupt(self, name: str, failure: ServingError) -> None:
        """Interrupt the operations of that name."""
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
