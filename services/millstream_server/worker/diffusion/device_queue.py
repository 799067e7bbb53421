"""The queue for a worker's device: one request uses it at a time, in the order of arrival."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Self

from millstream_server.runtime.telemetry.metrics import DIFFUSION_QUEUED

OnPosition = Callable[[int], None]


class QueueEntry:
    """One request, or a probe, in the queue; for a ``with`` block, whose end removes it."""

    def __init__(self, queue: DeviceQueue, on_position: OnPosition | None) -> None:
        """Use `DeviceQueue.join` to make one."""
        self.on_position = on_position
        self.position = 0
        """As last reported; 0: nobody was ahead."""
        self.acquired: asyncio.Future[None] | None = None
        """While its owner waits for the device."""
        self._queue = queue

    @property
    def is_request(self) -> bool:
        """Whether it is a request, not a probe."""
        return self.on_position is not None

    async def acquire(self) -> None:
        """Wait for the device; the entry has it until it leaves the queue."""
        self.acquired = asyncio.get_running_loop().create_future()
        self._queue.advance()
        await self.acquired

    def leave(self) -> None:
        """Leave the queue or free the device; a second call has no effect."""
        self._queue.leave(self)

    def __enter__(self) -> Self:
        """Return the entry."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Leave."""
        self.leave()


class DeviceQueue:
    """Gives the device to one entry at a time. All calls come from one event loop.

    An entry that hasn't asked for the device yet, since its input is still being prepared, keeps
    its position, but holds up no other: the device goes to the first one that has asked.
    """

    def __init__(self) -> None:
        """Start with nobody in it."""
        self._waiting: list[QueueEntry] = []
        self._running: QueueEntry | None = None

    @property
    def running_requests(self) -> int:
        """1 if a request has the device."""
        return int(self._running is not None and self._running.is_request)

    @property
    def queued_requests(self) -> int:
        """Requests that wait for it."""
        return sum(entry.is_request for entry in self._waiting)

    def join(self, on_position: OnPosition | None = None) -> QueueEntry:
        """Add an entry at the end of the queue; without ``on_position`` it is a probe's.

        ``on_position`` is called with the number of entries ahead, including the one with the
        device, at once and whenever it changes, unless it is 0: then the entry is the next one.
        """
        entry = QueueEntry(self, on_position)
        self._waiting.append(entry)
        self._report()
        return entry

    def leave(self, entry: QueueEntry) -> None:
        """See `QueueEntry.leave`."""
        if entry is self._running:
            self._running = None
        elif entry in self._waiting:
            self._waiting.remove(entry)
        else:
            return
        self.advance()
        self._report()

    def advance(self) -> None:
        """Give the device, if it is free, to the first who waits for it."""
        if self._running is not None:
            return
        for entry in self._waiting:
            acquired = entry.acquired
            if acquired is not None and not acquired.done():
                self._waiting.remove(entry)
                self._running = entry
                acquired.set_result(None)
                self._report()
                return

    def _report(self) -> None:
        DIFFUSION_QUEUED.set(self.queued_requests)
        ahead = 0 if self._running is None else 1
        for entry in self._waiting:
            if entry.position != ahead:
                entry.position = ahead
                if entry.on_position is not None and ahead:
                    entry.on_position(ahead)
            ahead += 1
