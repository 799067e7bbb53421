"""The requests that wait to run: their order and their positions in it.

Within a priority callers take turns, a request each, so that who sends thousands holds up its own.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import TYPE_CHECKING

from millstream_server.runtime.priority import Priority

if TYPE_CHECKING:
    from millstream_server.processor.admission import Admission, AdmissionQueue

MAX_OVERTAKEN = 7

Tell = Callable[[int], None]


class _Lane:
    """The waiting admissions of one priority, callers by turns."""

    __slots__ = ("waiting", "widths")

    def __init__(self) -> None:
        self.waiting: dict[str, dict[int, Admission]] = {}
        """Of each caller in order of arrival; the caller who is next is the first."""
        self.widths: Counter[int] = Counter()

    def add(self, admission: Admission) -> None:
        self.waiting.setdefault(admission.caller, {})[admission.number] = admission
        self.widths[admission.units] += 1

    def remove(self, admission: Admission, *, runs: bool) -> None:
        """Remove one; if it ``runs``, its caller had its turn."""
        own = self.waiting[admission.caller]
        del own[admission.number]
        if runs or not own:
            del self.waiting[admission.caller]
            if own:
                self.waiting[admission.caller] = own  # at the end
        self.widths[admission.units] -= 1

    def first(self, is_throttled: Callable[[str], bool]) -> Admission | None:
        for caller, own in self.waiting.items():
            if not is_throttled(caller):
                return next(iter(own.values()))
        return None

    def in_order(self) -> Iterator[Admission]:
        left = deque(iter(own.values()) for own in self.waiting.values())
        while left:
            own = left.popleft()
            if (admission := next(own, None)) is not None:
                yield admission
                left.append(own)

    def ahead_of(self, caller: str) -> Counter[int]:
        """Return the widths of its own and as many of each other's: they run before a new one."""
        turns, callers = len(self.waiting.get(caller, ())), self.waiting.values()
        if len(callers) == bool(turns):
            return self.widths
        return Counter(each.units for own in callers for each in islice(own.values(), turns))


class Waiting:
    """The requests of one queue that wait, by priority, then callers by turns."""

    def __init__(self, is_throttled: Callable[[str], bool]) -> None:
        """``is_throttled`` tells whether a caller's requests must wait while others' are next."""
        self._is_throttled = is_throttled
        self.lanes = {priority: _Lane() for priority in sorted(Priority, reverse=True)}
        """Highest priority first."""
        self.count = self.units = 0
        self.tokens = 0
        """Tokens that they may take."""
        self.overtaken = 0
        """How often in a row a later request has run before an earlier one of another priority."""

    def add(self, admission: Admission) -> None:
        self.lanes[admission.priority].add(admission)
        self.count += 1
        self.units += admission.units
        self.tokens += admission.tokens

    def remove(self, admission: Admission, *, runs: bool = False) -> None:
        self.lanes[admission.priority].remove(admission, runs=runs)
        self.count -= 1
        self.units -= admission.units
        self.tokens -= admission.tokens

    def widths(self, priority: Priority, caller: str | None) -> list[Counter[int]]:
        """Return the widths in units, by lane, of those that run before a new one; None: all."""
        return [
            lane.widths if caller is None or p > priority else lane.ahead_of(caller)
            for p, lane in self.lanes.items()
            if p >= priority
        ]

    def next(self) -> Admission | None:
        heads = self._heads()
        if not heads:
            return None
        late = self.overtaken >= MAX_OVERTAKEN
        return min(heads, key=lambda head: head.number) if late else heads[0]

    def may_be_passed(self, priority: Priority) -> bool:
        """Return whether a new request may go first: only lower, not yet overdue ones wait."""
        heads = self._heads()
        return not heads or (heads[0].priority < priority and self.overtaken < MAX_OVERTAKEN)

    def passed_by(self, admission: Admission) -> None:
        """Note that one runs, which doesn't wait any more or never did."""
        others = (head for head in self._heads() if head.priority is not admission.priority)
        overtakes = any(head.number < admission.number for head in others)
        self.overtaken = self.overtaken + 1 if overtakes else 0

    def _heads(self) -> list[Admission]:
        """Return each priority's first, highest priority first."""
        heads = (lane.first(self._is_throttled) for lane in self.lanes.values() if lane.waiting)
        return [head for head in heads if head is not None]

    def in_order(self) -> Iterator[Admission]:
        """Yield them in the order in which they will run, if no other comes."""
        overtaken = self.overtaken
        left = [deque(lane.in_order()) for lane in self.lanes.values() if lane.waiting]
        while left:
            late = overtaken >= MAX_OVERTAKEN
            lane = min(left, key=lambda lane: lane[0].number) if late else left[0]
            admission = lane.popleft()
            left = [each for each in left if each]
            overtakes = any(e[0].number < admission.number for e in left if e is not lane)
            overtaken = overtaken + 1 if overtakes else 0
            yield admission


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
        for admission in self._queue.waiting.in_order():
            position = max(1, ahead)  # 0 would say that it runs
            tell = self._waiting.get(admission)
            if tell is not None and self._told.get(admission) != position:
                self._told[admission] = position
                tell(position)
            ahead += 1
