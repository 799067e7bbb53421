"""Admission: which request runs now, which waits, which is refused.

Capacity is counted in units: a request for n choices takes n. A request that fits runs at once;
others wait, limited in number and in tokens. They are admitted by priority, then by arrival.
A wide request at the head isn't overtaken by narrow ones behind it, or it could wait for ever.

A request that has been overtaken by `MAX_OVERTAKEN` later ones in a row is next, whatever its
priority. A priority that rises with time would be worse: after some time a long queue of low
priority would go before everything else.

A wait is estimated as the work ahead, divided by the units that run at once. The work ahead is
(units ahead) x (mean time a unit is held), less the time that running units have been held already.
Unlike a departure rate this is also valid in the first second of a burst and after workers were
added or lost. It is a lower bound, since only ended requests enter the mean: a request is refused
for its deadline only if the deadline can't be met.

All calls come from one event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from millstream_server.processor.queue.admission import Admission, HeldTime, State
from millstream_server.runtime.errors import NoWorkerError, OverloadedError
from millstream_server.runtime.priority import Priority
from millstream_server.runtime.retry_delay import jittered
from millstream_server.runtime.telemetry import metrics

MAX_OVERTAKEN = 7
_UNKNOWN_DELAY_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueLimits:
    """Limits of one queue."""

    max_running: int = 0
    """Units that run at once; 0: the current capacity."""
    max_queued: int = 1024
    """Requests that wait."""
    max_queued_tokens: int = 32 << 20
    """Tokens that waiting requests may take."""
    comeback_s: float = 30.0
    """How long requests wait on after the last worker was lost: one may reconnect soon."""


class _Lane:
    """The waiting admissions of one priority, in order of arrival."""

    __slots__ = ("tokens", "units", "waiting", "widths")

    def __init__(self) -> None:
        self.waiting: OrderedDict[int, Admission] = OrderedDict()
        self.widths: Counter[int] = Counter()
        self.units = 0
        self.tokens = 0

    def add(self, admission: Admission) -> None:
        self.waiting[admission.number] = admission
        self.widths[admission.units] += 1
        self.units += admission.units
        self.tokens += admission.tokens

    def remove(self, admission: Admission) -> None:
        del self.waiting[admission.number]
        self.widths[admission.units] -= 1
        self.units -= admission.units
        self.tokens -= admission.tokens

    @property
    def first(self) -> Admission:
        return next(iter(self.waiting.values()))

    @property
    def last(self) -> Admission:
        return next(reversed(self.waiting.values()))


class AdmissionQueue:
    """The admission queue of one model."""

    def __init__(
        self,
        name: str,
        limits: QueueLimits,
        capacity: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``capacity`` returns how many units can run now; call `changed` after it has changed."""
        self.running = 0
        """Running units."""
        self.on_change: Callable[[], None] | None = None
        """Called after each change of what waits or runs, while somebody wants to know."""
        self._limits = limits
        self._capacity = capacity
        self._clock = clock
        self._lanes = {priority: _Lane() for priority in sorted(Priority, reverse=True)}
        self._arrivals = 0
        self.overtaken = 0
        """How often in a row a later request has run before an earlier one."""
        self.queued = 0
        """Requests that wait."""
        self._held = HeldTime()
        self._comeback: asyncio.TimerHandle | None = None
        self._metrics = _Metrics(name, self)

    @property
    def queued_tokens(self) -> int:
        """Tokens that waiting requests may take."""
        return sum(lane.tokens for lane in self._lanes.values())

    def lanes(self) -> list[Sequence[Admission]]:
        """Return the waiting requests of each priority in order of arrival, highest first."""
        return [list(lane.waiting.values()) for lane in self._lanes.values()]

    @property
    def limit(self) -> int:
        """Units that may run at once at the moment."""
        capacity = self._capacity()
        return (self._limits.max_running or capacity) if capacity else 0

    @property
    def utilization(self) -> float:
        """Running and waiting units divided by those that may run; 1 while none may."""
        limit = self.limit
        waiting = sum(lane.units for lane in self._lanes.values())
        return (self.running + waiting) / limit if limit else 1.0

    def enter(
        self,
        units: int = 1,
        *,
        tokens: int = 0,
        priority: Priority = Priority.NORMAL,
        timeout_s: float | None = None,
    ) -> Admission:
        """Add a request, whose caller's deadline is in ``timeout_s``: it runs or waits.

        Raises:
            OverloadedError: the queue is full, or the wait would exceed the deadline.
        """
        now_s = self._clock()
        admission = Admission(
            self._leave,
            self._arrivals,
            now_s,
            units=units,
            tokens=tokens,
            priority=priority,
            timeout_s=timeout_s,
        )
        self._arrivals += 1
        if (not self.queued or self._may_pass(priority)) and self._fits(units):
            self._run(admission, now_s)
            return admission
        self._check_deadline(units, priority, timeout_s)
        self._make_space(admission)
        self._lanes[priority].add(admission)
        self.queued += 1
        self._tell()
        self.changed()  # the displaced request may have been the one ahead of it
        return admission

    def _leave(self, admission: Admission) -> None:
        now_s = self._clock()
        if admission.state is State.RUNNING:
            self.running -= admission.units
            self._tell()
            self._held.end(admission.units, admission.since_s, now_s)
        elif admission.state is State.WAITING:
            self._forget(admission)
        else:
            return
        admission.change(State.LEFT, now_s)
        if self.queued:
            self._admit_next()

    def changed(self) -> None:
        """Admit the requests that fit now; call it after the capacity has changed."""
        if self._capacity():
            if self._comeback:
                self._comeback.cancel()
                self._comeback = None
            self._admit_next()
        elif self.queued and not self._comeback:
            self._comeback = asyncio.get_running_loop().call_later(
                self._limits.comeback_s, self._give_up
            )

    def _heads(self) -> list[Admission]:
        """Return each priority's first, highest priority first."""
        return [lane.first for lane in self._lanes.values() if lane.waiting]

    def _next(self) -> Admission | None:
        """Return the next one; it may not fit yet."""
        heads = self._heads()
        if not heads:
            return None
        return min(heads, key=_by_arrival) if self.overtaken >= MAX_OVERTAKEN else heads[0]

    def _may_pass(self, priority: Priority) -> bool:
        """Return whether a new request may go first: only lower, not yet overdue ones wait."""
        heads = self._heads()
        return not heads or (heads[0].priority < priority and self.overtaken < MAX_OVERTAKEN)

    def _fits(self, units: int) -> bool:
        limit = self.limit
        # One wider than the whole capacity runs alone.
        return self.running + units <= limit or (limit > 0 and not self.running)

    def _admit_next(self) -> None:
        while (admission := self._next()) and self._fits(admission.units):
            self._forget(admission)
            self._run(admission, self._clock())

    def _run(self, admission: Admission, now_s: float) -> None:
        overtakes = self.queued and any(h.number < admission.number for h in self._heads())
        self.overtaken = self.overtaken + 1 if overtakes else 0
        self._metrics.waited(admission.priority, now_s - admission.since_s)
        admission.change(State.RUNNING, now_s)
        self.running += admission.units
        self._held.begin(admission.units, now_s)
        self._tell()

    def _tell(self) -> None:
        if self.on_change is not None:
            self.on_change()

    def _forget(self, admission: Admission) -> None:
        """Remove it from its lane."""
        self._lanes[admission.priority].remove(admission)
        self.queued -= 1
        self._tell()

    def _give_up(self) -> None:
        """Fail all waiting requests: no worker has reconnected."""
        self._comeback = None
        for lane in self._lanes.values():
            for admission in list(lane.waiting.values()):
                admission.fail(
                    NoWorkerError(
                        "all workers of this model disconnected while the request waited, "
                        f"and none reconnected within {self._limits.comeback_s:.0f} s; retry",
                        retry_delay_s=self._delay_s(),
                    )
                )

    def _make_space(self, admission: Admission) -> None:
        """Check that one more can wait; displace requests of lower priority if needed."""
        limits = self._limits
        count, tokens = self.queued + 1, self.queued_tokens + admission.tokens
        lower = [lane for priority, lane in self._lanes.items() if priority < admission.priority]
        if count - sum(len(lane.waiting) for lane in lower) > limits.max_queued:
            self._refuse("requests", f"the queue is full ({limits.max_queued} waiting)")
        if tokens - sum(lane.tokens for lane in lower) > limits.max_queued_tokens:
            self._refuse(
                "tokens",
                f"this request's {admission.tokens} tokens and those of the waiting requests are "
                f"more than {limits.max_queued_tokens}",
            )
        for lane in reversed(lower):
            while lane.waiting and (count > limits.max_queued or tokens > limits.max_queued_tokens):
                last = lane.last
                count, tokens = count - 1, tokens - last.tokens
                metrics.ADMISSION_REFUSED.labels("displaced").inc()
                last.fail(self._overload("requests of higher priority took this one's place"))

    def _check_deadline(self, units: int, priority: Priority, timeout_s: float | None) -> None:
        wait_s = self.expected_wait_s(units, priority)
        if timeout_s is not None and wait_s is not None and timeout_s < wait_s:
            self._refuse(
                "deadline",
                f"this request would wait about {wait_s:.1f} s to run, and its deadline is in "
                f"{max(timeout_s, 0):.1f} s",
            )

    def _refuse(self, cause: str, why: str) -> None:
        metrics.ADMISSION_REFUSED.labels(cause).inc()
        raise self._overload(why)

    def _overload(self, why: str) -> OverloadedError:
        return OverloadedError(
            f"the server is busy: {why}; retry later", retry_delay_s=self._delay_s()
        )

    def expected_wait_s(self, units: int = 1, priority: Priority = Priority.NORMAL) -> float | None:
        """Estimate a new request's least wait in seconds; None without enough data."""
        ahead = [lane.widths for p, lane in self._lanes.items() if p >= priority]
        return self._held.wait_s(units, ahead, self.limit, self._clock())

    def _delay_s(self) -> float:
        """Return a refused client's retry delay: when half of the queue will have been admitted.

        Sooner the queue might still be full; later it might be empty.
        """
        whole_s = self.expected_wait_s(priority=Priority.LOW)
        return jittered(_UNKNOWN_DELAY_S if whole_s is None else whole_s / 2)


class _Metrics:
    """One queue's metrics."""

    def __init__(self, name: str, queue: AdmissionQueue) -> None:
        # Read at each scrape, which is cheaper than to set gauges at every request.
        metrics.ADMISSION_RUNNING.labels(name).set_function(lambda: queue.running)
        metrics.ADMISSION_QUEUED.labels(name).set_function(lambda: queue.queued)
        metrics.ADMISSION_QUEUED_TOKENS.labels(name).set_function(lambda: queue.queued_tokens)
        self._wait = {p: metrics.ADMISSION_WAIT.labels(name, p.name.lower()) for p in Priority}

    def waited(self, priority: Priority, seconds: float) -> None:
        self._wait[priority].observe(seconds)


def _by_arrival(admission: Admission) -> int:
    return admission.number
