"""Admission: which request runs now, which waits, which is refused.

Capacity is counted in units: a request for n choices takes n; and in prompt tokens, of which the
workers refuse more than a bound. A request that fits runs at once; others wait, limited in number
and in tokens. They are admitted by priority, then callers by turns. Above the limits lower
priorities lose their last ones, then the caller who has most waiting of the same priority. A wide
request, or a long one, at the head isn't overtaken by others behind it, or it could wait for ever.

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
from collections.abc import Callable, Iterable, Iterator
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

_MOST_OF_CALLER = 1024
"""Units of one caller that run while the process is full and others' run, too: with as many it
still makes messages of all tokens in time, and with more all callers wait for its event loop."""
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

    __slots__ = ("_decided", "_error", "_leave", "_timeout_s", "caller", "number", "priority",
                 "prompt", "since_s", "state", "tokens", "units")  # fmt: skip

    def __init__(
        self,
        leave: Callable[[Admission], None],
        number: int,
        now_s: float,
        *,
        units: int,
        tokens: int,
        prompt: int,
        priority: Priority,
        timeout_s: float | None,
        caller: str,
    ) -> None:
        """Use `AdmissionQueue.enter` to make one; ``number`` is the order of arrival."""
        self.number = number
        self.units = units
        self.tokens = tokens
        self.prompt = prompt
        self.priority = priority
        self.caller = caller
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
        is_full: Callable[[], bool] = bool,
        *,
        open_tokens: Callable[[], int] = int,
    ) -> None:
        """``capacity`` returns how many units can run now; call `changed` after it has changed.

        ``is_full`` tells whether this process has too much to send, ``open_tokens`` the most prompt
        tokens of what runs; 0: any number.
        """
        self.running = 0
        """Running units."""
        self.on_change: Callable[[], None] | None = None
        """Called after each change of what waits or runs, while somebody wants to know."""
        self._limits = limits
        self._capacity = capacity
        self._clock = clock
        self._is_full = is_full
        self._open_tokens = open_tokens
        self._prompts = 0
        """Prompt tokens of what runs."""
        self._running_of: dict[str, int] = {}
        """Running units by caller."""
        self.waiting = Waiting(self._is_throttled)
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
        prompt: int = 0,
        priority: Priority = Priority.NORMAL,
        timeout_s: float | None = None,
        caller: str = "",
    ) -> Admission:
        """Add a request of ``caller``, whose deadline is in ``timeout_s``: it runs or waits.

        Of its ``tokens`` at most, ``prompt`` are prompt tokens.

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
            prompt=prompt,
            priority=priority,
            timeout_s=timeout_s,
            caller=caller,
        )
        self._arrivals += 1
        waiting = self.waiting
        passes = not waiting.count or waiting.may_be_passed(priority)
        if passes and self._fits(admission) and not self._is_throttled(caller):
            self._run(admission, now_s)
            return admission
        if timeout_s is not None:
            self._check_deadline(admission, timeout_s)
        self._make_space(admission)
        waiting.add(admission)
        self._tell()
        self.changed()  # the displaced request may have been the one ahead of it
        return admission

    def _leave(self, admission: Admission) -> None:
        now_s = self._clock()
        if admission.state is State.RUNNING:
            self._count(admission.caller, -admission.units, -admission.prompt)
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

    def _fits(self, admission: Admission) -> bool:
        limit = self.limit
        if not self.running:  # one wider than the whole capacity runs alone
            return limit > 0
        if self.running + admission.units > limit:
            return False
        most = self._open_tokens()
        return not (most and self._prompts) or self._prompts + admission.prompt <= most

    def _is_throttled(self, caller: str) -> bool:
        """Whether a caller has so much running that its requests wait while others' don't."""
        own, callers = self._running_of.get(caller, 0), len(self._running_of)
        return own >= _MOST_OF_CALLER and callers > 1 and self._is_full()

    def _count(self, caller: str, units: int, prompt: int) -> None:
        self.running += units
        self._prompts += prompt
        own = self._running_of[caller] = self._running_of.get(caller, 0) + units
        if not own:
            del self._running_of[caller]

    def _admit_next(self) -> None:
        while (admission := self.waiting.next()) and self._fits(admission):
            self.waiting.remove(admission, runs=True)
            self._run(admission, self._clock())

    def _run(self, admission: Admission, now_s: float) -> None:
        if self.waiting.count:
            self.waiting.passed_by(admission)
        else:
            self.waiting.overtaken = 0
        self._waits[admission.priority].observe(now_s - admission.since_s)
        admission.change(State.RUNNING, now_s)
        self._count(admission.caller, admission.units, admission.prompt)
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
        """Check that one more can wait; displace others if needed."""
        limits = self._limits
        count, tokens = self.queued + 1, self.waiting.tokens + admission.tokens
        displaced, spare = list[Admission](), self._to_spare(admission)
        while (count > limits.max_queued or tokens > limits.max_queued_tokens) and (
            last := next(spare, None)
        ):
            displaced.append(last)
            count, tokens = count - 1, tokens - last.tokens
        if count > limits.max_queued:
            self._refuse("requests", f"the queue is full ({limits.max_queued} waiting)")
        if tokens > limits.max_queued_tokens:
            self._refuse(
                "tokens",
                f"this request's {admission.tokens} tokens and those of the waiting requests are "
                f"more than {limits.max_queued_tokens}",
            )
        for last in displaced:
            metrics.ADMISSION_REFUSED.labels("displaced").inc()
            higher = last.priority < admission.priority
            why = "of higher priority" if higher else "of a caller who has fewer"
            last.fail(self._overload(f"a request {why} took this one's place in the full queue"))

    def _to_spare(self, new: Admission) -> Iterator[Admission]:
        """Yield whose places a new one may take, the last ones first.

        They are those of lower priorities, then of its own those of the caller who has most, as
        long as that one keeps as much as the new one's caller gets.
        """
        for priority, lane in reversed(self.waiting.lanes.items()):
            if priority < new.priority:
                yield from reversed([*lane.in_order()])
        waiting = self.waiting.lanes[new.priority].waiting
        parts = {caller: sum(map(self._part, own.values())) for caller, own in waiting.items()}
        most = max(parts, key=parts.__getitem__, default="")
        wanted = parts.get(new.caller, 0) + self._part(new)
        for last in reversed(waiting.get(most, {}).values()):
            parts[most] -= self._part(last)
            if parts[most] < wanted:
                return
            yield last

    def _part(self, admission: Admission) -> int:
        """Return its part of the queue, by number and by tokens alike."""
        limits = self._limits
        return limits.max_queued_tokens + admission.tokens * limits.max_queued

    def _check_deadline(self, admission: Admission, timeout_s: float) -> None:
        wait_s = self.expected_wait_s(admission.units, admission.priority, admission.caller)
        if wait_s is not None and timeout_s < wait_s:
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

    def expected_wait_s(
        self, units: int = 1, priority: Priority = Priority.NORMAL, caller: str | None = None
    ) -> float | None:
        """Estimate a new request's least wait in seconds; None without enough data."""
        ahead = self.waiting.widths(priority, caller)
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
