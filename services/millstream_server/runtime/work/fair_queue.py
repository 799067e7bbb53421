"""Which work of the pool is next: fair between callers by the thread time that they use.

Work is long or short. Long is what takes more than 50 ms by its estimate, and batches, which wait
for no user. Each kind has one thread at least that the other can't take, so short work waits for
one piece of its own kind at most, whatever long work there is.

In each kind every caller has a lane, with the seconds of thread time that it has used. The lane
with the least, its first piece of work included, is next; so a caller with large texts waits for
those with small ones, but not for ever. Estimates count until the work is done, then the time
measured. A lane that begins to wait starts level with the one that was served last: who was silent
has saved nothing (start-time fair queueing; Goyal, Vin and Cheng, 1996).

Seconds of waiting work are bounded, by estimate, for each caller and for all. Above the bound for
all the caller who has most waiting pays: its last work is refused, if that caller isn't the new
work's own.

There are no locks here: `WorkPool` has one.
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import itemgetter

from millstream_server.runtime.errors import OverloadedError
from millstream_server.runtime.retry_delay import jittered
from millstream_server.runtime.telemetry import metrics

LONG_S = 0.05
"""Work of more seconds is long."""
_LEAST_S = 1e-3
"""What the shortest work counts for; also bounds the number that waits."""
_KEPT_LANES = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolLimits:
    """Limits of the pool's work."""

    threads: int = 2
    """With 1, long work holds up short work."""
    max_waiting_s: float = 120.0
    """Seconds of work that may wait, by estimate: as much as 60 of the largest texts take."""
    max_caller_waiting_s: float = 30.0
    """The same, for one caller: what one thread does before most clients give up."""


@dataclass(slots=True, eq=False)
class Work:
    """One piece of work."""

    run: Callable[[], None]
    refuse: Callable[[OverloadedError], None]
    """Called if it waits and others' work takes its place."""
    seconds: float
    """Estimated thread time."""
    caller: str = ""
    batch: bool = False
    """Whether it is long whatever its estimate."""
    gone: bool = False
    """Whether its caller has left: what runs may stop."""

    @property
    def long(self) -> bool:
        """Whether it may take all threads but one only."""
        return self.batch or self.seconds > LONG_S


@dataclass(slots=True, eq=False)
class _Lane:
    """One caller's work of one kind, in order of arrival."""

    used_s: float
    waiting: OrderedDict[int, Work] = field(default_factory=OrderedDict)
    running: int = 0
    entry: int = -1
    """Number of its entry in the heap; entries with other numbers are void."""

    @property
    def key(self) -> float:
        return self.used_s + next(iter(self.waiting.values())).seconds


class _Kind:
    """All lanes of one kind."""

    def __init__(self) -> None:
        self.running = 0
        self.waiting = 0
        self._lanes: dict[str, _Lane] = {}
        self._heap: list[tuple[float, int, _Lane]] = []
        """Lanes that wait, by their keys; `done` may have raised or lowered one since."""
        self._level_s = 0.0
        """`used_s` of the lane served last, before it was served."""
        self._entries = itertools.count()

    def add(self, work: Work) -> None:
        lane = self._lanes.get(work.caller)
        if lane is None:
            self._forget()
            lane = self._lanes[work.caller] = _Lane(self._level_s)
        if not lane.waiting:
            lane.used_s = max(lane.used_s, self._level_s)
        lane.waiting[id(work)] = work
        self.waiting += 1
        if len(lane.waiting) == 1:
            self._push(lane)

    def remove(self, work: Work) -> bool:
        lane = self._lanes.get(work.caller)
        if lane is None or lane.waiting.pop(id(work), None) is None:
            return False
        self.waiting -= 1
        if not lane.waiting:
            lane.entry = -1
        return True

    def last_of(self, caller: str) -> Work | None:
        """Return the caller's work that came last and waits."""
        lane = self._lanes.get(caller)
        return lane.waiting[next(reversed(lane.waiting))] if lane and lane.waiting else None

    def take(self) -> Work:
        """Take the next work; some must wait."""
        while True:
            key, entry, lane = heapq.heappop(self._heap)
            if entry != lane.entry:
                continue
            if lane.key <= key:
                break
            self._push(lane)
        _, work = lane.waiting.popitem(last=False)
        self._level_s = max(self._level_s, lane.used_s)
        lane.used_s += work.seconds
        lane.running += 1
        self.waiting -= 1
        self.running += 1
        lane.entry = -1
        if lane.waiting:
            self._push(lane)
        return work

    def done(self, work: Work, used_s: float) -> None:
        lane = self._lanes[work.caller]
        lane.used_s += used_s - work.seconds
        lane.running -= 1
        self.running -= 1
        if not self.running and not self.waiting:
            self._lanes.clear()
            self._heap.clear()
            self._level_s = 0.0

    def _push(self, lane: _Lane) -> None:
        if len(self._heap) > 2 * len(self._lanes) + _KEPT_LANES:  # void entries
            self._heap = [entry for entry in self._heap if entry[1] == entry[2].entry]
            heapq.heapify(self._heap)
        lane.entry = next(self._entries)
        heapq.heappush(self._heap, (lane.key, lane.entry, lane))

    def _forget(self) -> None:
        """Forget idle lanes, those first that would start level with a new one."""
        if len(self._lanes) < _KEPT_LANES:
            return
        idle = [c for c, lane in self._lanes.items() if not (lane.waiting or lane.running)]
        idle.sort(key=lambda caller: self._lanes[caller].used_s)
        for caller in idle[: len(idle) // 2 + 1]:
            del self._lanes[caller]


class FairQueue:
    """All work that waits or runs."""

    def __init__(self, limits: PoolLimits) -> None:
        self._limits = limits
        self._short = _Kind()
        self._long = _Kind()
        self._waiting_s: dict[str, float] = {}
        self.waiting_s = 0.0
        """Seconds of work that wait, by estimate."""

    def add(self, work: Work) -> None:
        """Let work wait.

        Raises:
            OverloadedError: too much waits, of this caller or of all.
        """
        seconds = max(work.seconds, _LEAST_S)
        own_s = self._waiting_s.get(work.caller, 0.0)
        limits = self._limits
        # Who has nothing waiting may always wait: one text is bounded by its message.
        if own_s and own_s + seconds > limits.max_caller_waiting_s:
            raise _overload("this caller's", own_s, seconds, limits.max_caller_waiting_s)
        while self.waiting_s and self.waiting_s + seconds > limits.max_waiting_s:
            self._displace(own_s + seconds, seconds)
        self._kind(work).add(work)
        self._count(work, seconds)

    def remove(self, work: Work) -> bool:
        """Take work out whose caller has left; return False if it runs or has run."""
        work.gone = True
        if not self._kind(work).remove(work):
            return False
        self._count(work, -max(work.seconds, _LEAST_S))
        return True

    def take(self) -> Work | None:
        """Return what a free thread does next, or None; call `done` after it."""
        short, long = self._short, self._long
        reserved = max(1, self._limits.threads - 1)
        if long.waiting and not long.running and short.running >= reserved:
            kind = long  # else short work could take all threads for ever
        elif short.waiting:
            kind = short
        elif long.waiting and long.running < reserved:
            kind = long
        else:
            return None
        work = kind.take()
        self._count(work, -max(work.seconds, _LEAST_S))
        return work

    def done(self, work: Work, used_s: float) -> None:
        """Work has ended, after so many seconds of thread time."""
        self._kind(work).done(work, used_s)

    def _kind(self, work: Work) -> _Kind:
        return self._long if work.long else self._short

    def _count(self, work: Work, seconds: float) -> None:
        own_s = self._waiting_s.get(work.caller, 0.0) + seconds
        # Sums of floats: what is left of 0 is smaller than the smallest work.
        if own_s < _LEAST_S / 2:
            self._waiting_s.pop(work.caller, None)
        else:
            self._waiting_s[work.caller] = own_s
        self.waiting_s = self.waiting_s + seconds if self._waiting_s else 0.0

    def _displace(self, own_s: float, seconds: float) -> None:
        """Refuse the last work of the caller that has most waiting.

        Raises:
            OverloadedError: the new work's caller, with ``own_s``, would have most.
        """
        most, waiting_s = max(self._waiting_s.items(), key=itemgetter(1))
        last = self._long.last_of(most) or self._short.last_of(most)
        if last is None or waiting_s <= own_s:
            raise _overload("all callers'", self.waiting_s, seconds, self._limits.max_waiting_s)
        self.remove(last)
        last.refuse(
            _overload("all callers'", self.waiting_s, last.seconds, self._limits.max_waiting_s)
        )


def _overload(whose: str, waiting_s: float, seconds: float, most_s: float) -> OverloadedError:
    metrics.ADMISSION_REFUSED.labels("text").inc()
    return OverloadedError(
        f"the server is busy: {whose} bodies and texts that wait to be read take about "
        f"{waiting_s:.1f} s, and this one {seconds:.1f} s; at most {most_s:g} s may wait; retry "
        "later",
        retry_delay_s=jittered(waiting_s / 2),
    )
