"""Where waiting requests are in their queue, told to those who want to know."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator

from millstream_server.processor.queue.admission import Admission
from millstream_server.processor.queue.admission_queue import MAX_OVERTAKEN, AdmissionQueue

Tell = Callable[[int], None]


class Positions:
    """Tells waiting requests of one queue how many run before them, whenever that changes.

    The number is true as long as no request of a higher priority comes. It has what runs and waits
    at the workers, too: other Processors' requests, as of the workers' last load reports.
    """

    def __init__(self, queue: AdmissionQueue, outstanding: Callable[[], int]) -> None:
        """Follow ``queue``; ``outstanding`` returns the requests that its workers have."""
        self._queue = queue
        self._outstanding = outstanding
        self._waiting: dict[Admission, Tell] = {}
        self._told: dict[Admission, int] = {}
        self._due = False

    def follow(self, admission: Admission, tell: Tell) -> None:
        """Call ``tell`` with the number, soon and after changes, until the admission runs."""
        self._waiting[admission] = tell
        self._queue.on_change = self._changed
        self._changed()

    def forget(self, admission: Admission) -> None:
        """Tell no more."""
        self._waiting.pop(admission, None)
        self._told.pop(admission, None)
        if not self._waiting:
            self._queue.on_change = None

    def _changed(self) -> None:
        """Compute once per round of the event loop, however much happens in it."""
        if self._waiting and not self._due:
            self._due = True
            asyncio.get_running_loop().call_soon(self._tell)

    def _tell(self) -> None:
        self._due = False
        ahead = max(self._queue.running, self._outstanding())
        for admission in in_order(self._queue.lanes(), self._queue.overtaken):
            position = max(1, ahead)  # 0 would say that it runs
            tell = self._waiting.get(admission)
            if tell is not None and self._told.get(admission) != position:
                self._told[admission] = position
                tell(position)
            ahead += 1


def in_order(lanes: Iterable[Iterable[Admission]], overtaken: int) -> Iterator[Admission]:
    """Yield waiting requests in the order in which `AdmissionQueue` would run them.

    ``lanes`` are those of each priority, highest first. See `AdmissionQueue` for the order.
    """
    left = [lane for admissions in lanes if (lane := deque(admissions))]
    while left:
        late = overtaken >= MAX_OVERTAKEN
        lane = min(left, key=lambda lane: lane[0].number) if late else left[0]
        admission = lane.popleft()
        left = [lane for lane in left if lane]
        overtakes = any(lane[0].number < admission.number for lane in left)
        overtaken = overtaken + 1 if overtakes else 0
        yield admission
