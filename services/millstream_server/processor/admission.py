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
import enum
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from millstream_server.processor.waiting import Waiting
from millstream_server.runtime.errors import (
    DeadlinePassedError,
    Failure,
    NoWorkerError,
    OverloadedError,
)
from millstream_server.runtime.priority import Priority
from millstream_server.runtime.retry_delay import jittered
from millstream_server.runtime.telemetry import metrics

_UNKNOWN_DELAY_S = 1.0
_ENOUGH = 8
"""Number of requests that must have ended before a wait is estimated."""
_MEMORY = 32
"""The mean is over about this many units."""


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


class State(enum.Enum):
    """States in this order; an admission may skip any but the last."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    LEFT = enum.auto()


class Admission:
    """One request's admission: it waits or runs, until `leave`.

    The caller of `AdmissionQueue.enter` must call `leave` at the end in every case; a second call
    has no effect. If it `waits`, await `admitted` once.
    """

    __slots__ = ("_decided", "_error", "_leave", "_timeout_s", "number", "priority", "since_s",
                 "state", "tokens", "units")  # fmt: skip

    def __init__(
        self,
        leave: Callable[[Admission], None],
        number: int,
        now_s: float,
        *,
        units: int,
        tokens: int,
        priority: Priority,
        timeout_s: float | None,
    ) -> None:
        """Use `AdmissionQueue.enter` to make one; ``number`` is the order of arrival."""
        self.number = number
        self.units = units
        self.tokens = tokens
        self.priority = priority
        self.state = State.WAITING
        self.since_s = now_s
        """When it entered the current state."""
        self._leave = leave
        self._timeout_s = timeout_s
        self._decided: asyncio.Future[None] | None = None
        self._error: Failure | None = None

    @property
    def waits(self) -> bool:
        return self.state is State.WAITING

    @property
    def runs(self) -> bool:
        """Whether it was admitted and `leave` wasn't called."""
        return self.state is State.RUNNING

    async def admitted(self) -> None:
        """Wait until it `runs` or was cancelled.

        Raises:
            ServingError: it was displaced, no worker reconnected, or the error given to `fail`.
            DeadlinePassedError: the caller's deadline passed.
        """
        if self.waits:
            self._decided = asyncio.get_running_loop().create_future()
            try:
                async with asyncio.timeout(self._timeout_s):
                    await self._decided
            except TimeoutError:
                self.leave()
                raise DeadlinePassedError(
                    "the deadline passed while the request waited to run"
                ) from None
        if self._error:
            raise self._error

    def cancel(self) -> None:
        """Remove it from the queue; no effect once it runs."""
        if self.waits:
            self.leave()

    def fail(self, error: Failure) -> None:
        """Remove it from the queue with an error; no effect once it runs."""
        if self.waits:
            self._error = error
            self.leave()

    def leave(self) -> None:
        """Release its capacity, or stop waiting."""
        if self.state is not State.LEFT:
            self._leave(self)

    def change(self, state: State, now_s: float) -> None:
        """Set the state. For the queue only."""
        self.state, self.since_s = state, now_s
        if self._decided and not self._decided.done():
            self._decided.set_result(None)


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
        self.waiting = Waiting()
        self._arrivals = 0
        self._held = HeldTime()
        self._comeback: asyncio.TimerHandle | None = None
        # Read at each scrape, which is cheaper than to set gauges at every request.
        metrics.ADMISSION_RUNNING.labels(name).set_function(lambda: self.running)
        metrics.ADMISSION_QUEUED.labels(name).set_function(lambda: self.waiting.count)
        metrics.ADMISSION_QUEUED_TOKENS.labels(name).set_function(lambda: self.waiting.tokens)
        self._waits = {p: metrics.ADMISSION_WAIT.labels(name, p.name.lower()) for p in Priority}

    @property
    def queued(self) -> int:
        return self.waiting.count

    @property
    def limit(self) -> int:
        """Units that may run at once at the moment."""
        capacity = self._capacity()
        return (self._limits.max_running or capacity) if capacity else 0

    @property
    def utilization(self) -> float:
        """Running and waiting units divided by those that may run; 1 while none may."""
        limit = self.limit
        return (self.running + self.waiting.units) / limit if limit else 1.0

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
        waiting = self.waiting
        if (not waiting.count or waiting.may_be_passed(priority)) and self._fits(units):
            self._run(admission, now_s)
            return admission
        self._check_deadline(units, priority, timeout_s)
        self._make_space(admission)
        waiting.add(admission)
        self._tell()
        self.changed()  # the displaced request may have been the one ahead of it
        return admission

    def _leave(self, admission: Admission) -> None:
        now_s = self._clock()
        if admission.state is State.RUNNING:
            self.running -= admission.units
            self._held.end(admission.units, admission.since_s, now_s)
        elif admission.state is State.WAITING:
            self.waiting.remove(admission)
        else:
            return
        self._tell()
        admission.change(State.LEFT, now_s)
        if self.waiting.count:
            self._admit_next()

    def changed(self) -> None:
        """Admit the requests that fit now; call it after the capacity has changed."""
        if self._capacity():
            if self._comeback:
                self._comeback.cancel()
                self._comeback = None
            self._admit_next()
        elif self.waiting.count and not self._comeback:
            self._comeback = asyncio.get_running_loop().call_later(
                self._limits.comeback_s, self._give_up
            )

    def _fits(self, units: int) -> bool:
        limit = self.limit
        # One wider than the whole capacity runs alone.
        return self.running + units <= limit or (limit > 0 and not self.running)

    def _admit_next(self) -> None:
        while (admission := self.waiting.next()) and self._fits(admission.units):
            self.waiting.remove(admission)
            self._run(admission, self._clock())

    def _run(self, admission: Admission, now_s: float) -> None:
        if self.waiting.count:
            self.waiting.passed_by(admission)
        else:
            self.waiting.overtaken = 0
        self._waits[admission.priority].observe(now_s - admission.since_s)
        admission.change(State.RUNNING, now_s)
        self.running += admission.units
        self._held.begin(admission.units, now_s)
        self._tell()

    def _tell(self) -> None:
        if self.on_change is not None:
            self.on_change()

    def _give_up(self) -> None:
        """Fail all waiting requests: no worker has reconnected."""
        self._comeback = None
        for admission in list(self.waiting.in_order()):
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
        count, tokens = self.queued + 1, self.waiting.tokens + admission.tokens
        lower = [
            lane for priority, lane in self.waiting.lanes.items() if priority < admission.priority
        ]
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
        ahead = self.waiting.widths(priority)
        return self._held.wait_s(units, ahead, self.limit, self._clock())

    def _delay_s(self) -> float:
        """Return a refused client's retry delay: when half of the queue will have been admitted.

        Sooner the queue might still be full; later it might be empty.
        """
        whole_s = self.expected_wait_s(priority=Priority.LOW)
        return jittered(_UNKNOWN_DELAY_S if whole_s is None else whole_s / 2)


class HeldTime:
    """Running requests, and the mean time that a unit was held. Times are on the queue's clock."""

    def __init__(self) -> None:
        self._running: Counter[int] = Counter()
        """Number of running requests by their width in units."""
        self._running_units = 0
        self._started_s = 0.0
        """Sum of the running units' start times."""
        self._ended = 0
        self._held_units = 0
        self._mean_s = 0.0

    def begin(self, units: int, now_s: float) -> None:
        self._running[units] += 1
        self._running_units += units
        self._started_s += units * now_s

    def end(self, units: int, since_s: float, now_s: float) -> None:
        """Remove a request that started at ``since_s``."""
        self._running[units] -= 1
        self._running_units -= units
        self._started_s = self._started_s - units * since_s if self._running_units else 0.0
        self._ended += 1
        self._held_units = min(self._held_units + units, _MEMORY)
        share = min(1.0, units / self._held_units)
        self._mean_s += (now_s - since_s - self._mean_s) * share

    def wait_s(
        self, units: int, ahead: Iterable[Counter[int]], limit: int, now_s: float
    ) -> float | None:
        """Estimate the least wait of ``units`` behind requests of the widths ``ahead``, in seconds.

        None without enough data; the formula is above.
        """
        if self._ended < _ENOUGH or not limit:
            return None
        running = _filled(self._running, limit)
        waiting = sum(_filled(widths, limit) for widths in ahead)
        missing = running + waiting + min(units, limit) - limit
        held_s = now_s - self._started_s / self._running_units if self._running_units else 0.0
        # Those held for longer than the mean may be stuck: they reduce the work by the mean at
        # most.
        work_s = missing * self._mean_s - running * min(held_s, self._mean_s)
        return max(0.0, work_s) / limit


def _filled(widths: Counter[int], limit: int) -> int:
    """Count the units that requests of these widths use: each at most ``limit``."""
    return sum(min(width, limit) * requests for width, requests in widths.items())
