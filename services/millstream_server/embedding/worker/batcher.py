"""Joins the inputs of many requests into batches for the engine."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from millstream_server.runtime.errors import EngineFailedError, ServingError
from millstream_server.runtime.telemetry.log import get_log
from millstream_server.runtime.telemetry.metrics import EMBED_BATCHED_INPUTS, EMBED_BATCHES
from millstream_server.worker.open_requests import told

log = get_log(__name__)

Rows = NDArray[np.float32]
Compute = Callable[[Sequence[Sequence[int]]], Awaitable[Rows]]

_AT_ONCE = 2
"""One batch runs, one waits in the engine, which so never idles."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    """How large a batch becomes."""

    max_tokens: int
    """A single input may have more."""
    max_inputs: int
    max_unread: int
    """A request with so many results that were not read yet gets no further ones."""


@dataclass(frozen=True, slots=True)
class Part:
    """Some results of a request."""

    indices: range
    """Which inputs."""
    rows: Rows
    """One per index."""


@dataclass(slots=True, eq=False)
class _Job:
    """A request with inputs that have no results yet."""

    inputs: Sequence[Sequence[int]]
    begun: int = 0
    """Inputs from here on are in no batch yet."""
    alone: deque[range] = field(default_factory=deque)
    """Inputs of a batch that failed; they are tried again without other requests' inputs."""
    parts: deque[Part] = field(default_factory=deque)
    unread: int = 0
    error: ServingError | None = None
    dropped: bool = False
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    tokens: int = 0
    """Of the inputs that are in no batch yet."""

    def fits(self, tokens: int, inputs: int) -> bool:
        """Return whether all of it that is in no batch yet is within this."""
        return self.tokens <= tokens and len(self.inputs) - self.begun <= inputs

    @property
    def waits(self) -> bool:
        return self.begun < len(self.inputs) or bool(self.alone)


_Batch = Sequence[tuple[_Job, range]]


class Batcher:
    """Runs inputs through the engine, in batches of several requests. For one event loop.

    A batch has each request that fits its fair share of it, a share of the one whose turn it is,
    and then, in turn, more of what waits. So a large request delays a small one by the batches that
    are in the engine and its own, and requests of equal size end one after another, not all at
    once. An idle engine starts at once: batches form from what comes while it works.
    """

    def __init__(self, compute: Compute, limits: BatchLimits) -> None:
        self._compute = compute
        self._limits = limits
        self._queue: deque[_Job] = deque()
        self._running: dict[asyncio.Task[Rows], _Batch] = {}
        self._waking = False

    async def run(self, inputs: Sequence[Sequence[int]]) -> AsyncGenerator[Part, None]:
        """Yield the results of all inputs, as they finish; close it to drop the rest."""
        job = _Job(inputs, tokens=sum(map(len, inputs)))
        self._queue.append(job)
        self._wake()
        left = len(inputs)
        try:
            while left:
                while not job.parts and job.error is None:
                    job.changed.clear()
                    await job.changed.wait()
                if job.error is not None:
                    raise job.error
                part = job.parts.popleft()
                yield part
                left -= len(part.indices)
                job.unread -= len(part.indices)
                self._wake()
        finally:
            self._drop(job)

    def _wake(self) -> None:
        """Start batches, with all else that comes in this turn of the loop."""
        if not self._waking:
            self._waking = True
            asyncio.get_running_loop().call_soon(self._start)

    def _start(self) -> None:
        self._waking = False
        while len(self._running) < _AT_ONCE and (batch := self._take()):
            inputs = [job.inputs[index] for job, indices in batch for index in indices]
            EMBED_BATCHES.inc()
            EMBED_BATCHED_INPUTS.inc(len(inputs))
            task = asyncio.ensure_future(self._compute(inputs))
            self._running[task] = batch
            task.add_done_callback(self._ended)

    def _take(self) -> _Batch:
        """Remove the next batch from the queue; empty: there is none."""
        jobs = [job for job in self._queue if job.unread < self._limits.max_unread]
        if not jobs:
            return ()
        if jobs[0].alone:
            batch = [(jobs[0], jobs[0].alone.popleft())]
        else:
            batch = self._shared([job for job in jobs if not job.alone])
        for job, indices in batch:
            job.unread += len(indices)
            self._queue.remove(job)
            if job.waits:
                self._queue.append(job)  # behind those that had no turn
        return batch

    def _shared(self, jobs: Sequence[_Job]) -> list[tuple[_Job, range]]:
        """Give small jobs and the first one their share of a batch, then the room in turn."""
        limits = self._limits
        room = _Room(limits.max_tokens, limits.max_inputs)
        share = (limits.max_tokens // len(jobs), max(1, limits.max_inputs // len(jobs)))
        first = {job: job.begun for job in jobs}
        served = [job for job in jobs if job is jobs[0] or job.fits(*share)]
        for some, (tokens, inputs) in (
            (served, share),
            (jobs, (limits.max_tokens, limits.max_inputs)),
        ):
            for job in some:
                self._fill(room, job, first[job], tokens, inputs)
        return [(job, range(first[job], job.begun)) for job in jobs if job.begun > first[job]]

    def _fill(self, room: _Room, job: _Job, first: int, tokens: int, inputs: int) -> None:
        """Take from ``first`` on, but for the first input at most so many tokens and inputs."""
        most = min(inputs, self._limits.max_unread - job.unread)
        taken = sum(len(job.inputs[index]) for index in range(first, job.begun))
        while job.begun < len(job.inputs) and job.begun - first < most:
            size = len(job.inputs[job.begun])
            if (taken and taken + size > tokens) or not room.take(size):
                break
            taken += size
            job.tokens -= size
            job.begun += 1

    def _ended(self, task: asyncio.Task[Rows]) -> None:
        batch = self._running.pop(task)
        error = None if task.cancelled() else task.exception()
        if task.cancelled():
            if not all(job.dropped for job, _ in batch):
                self._failed(batch, EngineFailedError("The engine dropped the batch."))
        elif error is not None:
            self._failed(batch, error)
        else:
            self._deliver(batch, task.result())
        self._wake()

    def _deliver(self, batch: _Batch, rows: Rows) -> None:
        done = 0
        for job, indices in batch:
            part = rows[done : done + len(indices)]
            done += len(indices)
            if not job.dropped:
                # A copy: else an unread part keeps the others' memory.
                job.parts.append(Part(indices, part if len(batch) == 1 else part.copy()))
                job.changed.set()

    def _failed(self, batch: _Batch, error: BaseException) -> None:
        """Fail a request whose inputs failed alone; else its inputs are tried alone."""
        failure = told("a batch failed", error)
        again = len(batch) > 1 and not isinstance(error, EngineFailedError)
        if again:
            log.warning("a batch failed; its requests are tried alone", requests=len(batch))
        for job, indices in batch:
            if job.dropped:
                continue
            if not again:
                job.error = failure
                job.changed.set()
                continue
            job.alone.append(indices)
            job.unread -= len(indices)
            if job not in self._queue:
                self._queue.append(job)

    def _drop(self, job: _Job) -> None:
        """Forget a request; a batch that has nothing else is stopped."""
        job.dropped = True
        if job in self._queue:
            self._queue.remove(job)
        for task, batch in self._running.items():
            if all(other.dropped for other, _ in batch):
                task.cancel()


class _Room:
    """What a batch can still take."""

    def __init__(self, tokens: int, inputs: int) -> None:
        self.tokens = tokens
        self.inputs = inputs
        self._empty = True

    def take(self, size: int) -> bool:
        """Take an input of ``size`` tokens; the first one fits in any case."""
        if self.inputs <= 0 or (size > self.tokens and not self._empty):
            return False
        self._empty = False
        self.tokens -= size
        self.inputs -= 1
        return True
