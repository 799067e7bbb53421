"""Groups prepared items into batches for the vision tower; times each item's stages."""

from __future__ import annotations

import asyncio
import enum
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from millstream_server.encode.encoder import Prepared
from millstream_server.media.tensor import Tensor
from millstream_server.runtime.telemetry.log import get_log
from millstream_server.runtime.telemetry.metrics import (
    ENCODE_BATCHED_ITEMS,
    ENCODE_BATCHES,
    ENCODE_STAGE_DURATION,
)
from millstream_server.runtime.threads import DaemonThreads
from millstream_server.worker.open_requests import Stages, told

log = get_log(__name__)

_QUEUED_BATCHES = 2
"""`room` waits while more than this many batches' cost is queued: prepared items are large."""


class EncodeStage(enum.Enum):
    """A part of an item's way; the values are metrics' labels."""

    UPLOAD = "upload"
    QUEUE = "queue"
    """Waits for its turn to be decoded."""
    DECODE = "decode"
    PREPARE = "prepare"
    BATCH_QUEUE = "batch_queue"
    """Prepared; waits for the tower."""
    FORWARD = "forward"
    """In the tower, with the rest of its batch."""


class EncodeStages(Stages[EncodeStage]):
    """Durations of one item's stages."""

    __slots__ = ()

    ability = "encode"
    histograms = {stage: ENCODE_STAGE_DURATION.labels(stage.value) for stage in EncodeStage}  # noqa: RUF012


@dataclass(slots=True, eq=False)
class _Entry:
    prepared: Prepared
    stages: EncodeStages
    future: asyncio.Future[Tensor]
    alone: bool = False
    """Its batch failed; it is tried by itself."""
    since: float = field(default_factory=time.monotonic)


class ItemBatcher:
    """Runs `MediaEncoder.encode`, one call at a time, in one thread. For one event loop.

    A batch has items of one modality, of any requests and streams, as many as the cost budget
    allows, in the order in which they came. An idle tower starts at once: batches form from what
    comes while it works. When a batch of several fails, each of its items is tried alone.
    """

    def __init__(self, encode: Callable[[Sequence[Prepared]], list[Tensor]], max_cost: int) -> None:
        """Call ``encode`` with batches of up to ``max_cost``; one larger item is its own batch."""
        self._encode = encode
        self._max_cost = max_cost
        self._queue: deque[_Entry] = deque()
        self._queued_cost = 0
        self._threads = DaemonThreads(1, "encoder")
        self._taken = asyncio.Event()
        self._running = 0
        self._closed = False

    @property
    def running(self) -> int:
        return self._running

    @property
    def queued(self) -> int:
        return len(self._queue)

    async def run(self, prepared: Prepared, stages: EncodeStages) -> Tensor:
        """Encode an item. Cancel it to drop the result."""
        loop = asyncio.get_running_loop()
        entry = _Entry(prepared, stages, loop.create_future())
        self._queue.append(entry)
        self._queued_cost += prepared.cost
        if not self._running:
            loop.call_soon(self._start)  # with all else that comes in this turn of the loop
        try:
            return await entry.future
        except asyncio.CancelledError:
            self._drop(entry)
            raise

    async def room(self) -> None:
        """Wait until the queue is short enough for another item."""
        while self._queued_cost > _QUEUED_BATCHES * self._max_cost:
            self._taken.clear()
            await self._taken.wait()

    def close(self) -> None:
        """End the thread when its batch has ended; start no other."""
        self._closed = True
        self._threads.close()

    def _start(self) -> None:
        if self._running or self._closed:
            return
        batch = self._take()
        if batch:
            self._running = len(batch)
            ENCODE_BATCHES.inc()
            ENCODE_BATCHED_ITEMS.inc(len(batch))
            now = time.monotonic()
            for entry in batch:
                entry.stages.add(EncodeStage.BATCH_QUEUE, now - entry.since)
            prepared = [entry.prepared for entry in batch]
            running = asyncio.wrap_future(self._threads.submit(self._encode, prepared))
            running.add_done_callback(lambda done: self._ended(batch, now, done))

    def _take(self) -> list[_Entry]:
        """Remove the next batch from the queue: the first item, and what fits beside it."""
        batch: list[_Entry] = []
        kept: deque[_Entry] = deque()
        cost = 0
        for entry in self._queue:
            if not batch or self._fits(entry, batch[0], cost):
                cost += entry.prepared.cost
                batch.append(entry)
            else:
                kept.append(entry)
        self._queue = kept
        self._queued_cost -= cost
        self._taken.set()
        return batch

    def _drop(self, entry: _Entry) -> None:
        """Forget a cancelled item if it isn't in the tower yet: it is large."""
        if entry in self._queue:
            self._queue.remove(entry)
            self._queued_cost -= entry.prepared.cost
            self._taken.set()

    def _fits(self, entry: _Entry, first: _Entry, cost: int) -> bool:
        return (
            not (first.alone or entry.alone)
            and entry.prepared.modality is first.prepared.modality
            and cost + entry.prepared.cost <= self._max_cost
        )

    def _ended(self, batch: list[_Entry], began: float, done: asyncio.Future[list[Tensor]]) -> None:
        self._running = 0
        error = None if done.cancelled() else done.exception()
        if error is None and not done.cancelled() and len(done.result()) == len(batch):
            took = time.monotonic() - began
            for entry, tensor in zip(batch, done.result(), strict=True):
                entry.stages.add(EncodeStage.FORWARD, took)
                if not entry.future.done():
                    entry.future.set_result(tensor)
        else:
            self._failed(batch, error)
        self._start()

    def _failed(self, batch: list[_Entry], error: BaseException | None) -> None:
        if len(batch) > 1:
            log.warning("a batch failed; its items are tried alone", items=len(batch))
            for entry in batch:
                entry.alone, entry.since = True, time.monotonic()
            again = [entry for entry in batch if not entry.future.done()]
            self._queue.extendleft(reversed(again))
            self._queued_cost += sum(entry.prepared.cost for entry in again)
            return
        for entry in batch:
            if not entry.future.done():
                failure = error or asyncio.CancelledError()
                entry.future.set_exception(told("an item can't be encoded", failure))
