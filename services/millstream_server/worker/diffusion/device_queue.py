"""The queue for a worker's device: one request uses it at a time, in the order of arrival."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Self

from millstream_server.runtime.telemetry.metrics import DIFFUSION_QUEUED

OnPosition = Callable[[int], None]


class Place:
    """One request's place in the queue, for a ``with`` block; its end frees it."""

    def __init__(self, queue: DeviceQueue, on_position: OnPosition | None) -> None:
        """Use `DeviceQueue.join` to make one."""
        self.on_position = on_position
        self.position = 0
        """As last reported; 0: nobody was ahead."""
        self.turn_came: asyncio.Future[None] | None = None
        """While its owner waits for the device."""
        self._queue = queue

    @property
    def is_request(self) -> bool:
        """Whether a request has it, not a probe."""
        return self.on_position is not None

    async def turn(self) -> None:
        """Wait for the device; it is this place's until the place is left."""
        self.turn_came = asyncio.get_running_loop().create_future()
        self._queue.advance()
        await self.turn_came

    def leave(self) -> None:
        """Leave the queue or free the device; a second call has no effect."""
        self._queue.leave(self)

    def __enter__(self) -> Self:
        """Return the place."""
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
    """Gives the device to one place at a time. All calls come from one event loop.

    A place that hasn't asked for its turn yet, since its input is still being prepared, keeps its
    position, but holds up nobody: the device goes to the first one that has.
    """

    def __init__(self) -> None:
        """Start with nobody in it."""
        self._waiting: list[Place] = []
        self._running: Place | None = None

    @property
    def running_requests(self) -> int:
        """1 if a request has the device."""
        return int(self._running is not None and self._running.is_request)

    @property
    def queued_requests(self) -> int:
        """Requests that wait for it."""
        return sum(place.is_request for place in self._waiting)

    def join(self, on_position: OnPosition | None = None) -> Place:
        """Return a place at the end of the queue; without ``on_position`` it is a probe's.

        ``on_position`` is called with the number of places ahead, the one with the device included,
        at once and whenever it changes, unless it is 0: then the place's turn comes next.
        """
        place = Place(self, on_position)
        self._waiting.append(place)
        self._report()
        return place

    def leave(self, place: Place) -> None:
        """See `Place.leave`."""
        if place is self._running:
            self._running = None
        elif place in self._waiting:
            self._waiting.remove(place)
        else:
            return
        self.advance()
        self._report()

    def advance(self) -> None:
        """Give the device, if it is free, to the first who waits for it."""
        if self._running is not None:
            return
        for place in self._waiting:
            turn = place.turn_came
            if turn is not None and not turn.done():
                self._waiting.remove(place)
                self._running = place
                turn.set_result(None)
                self._report()
                return

    def _report(self) -> None:
        DIFFUSION_QUEUED.set(self.queued_requests)
        ahead = 0 if self._running is None else 1
        for place in self._waiting:
            if place.position != ahead:
                place.position = ahead
                if place.on_position is not None and ahead:
                    place.on_position(ahead)
            ahead += 1
