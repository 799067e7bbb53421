"""Who runs now, who waits, who is refused: a queue in front of something with limited room.

Room is counted in units (a request for n answers takes n). A request that fits runs at once; others
wait, bounded in number and in tokens, and are let through in order of priority, then of arrival.
A wide request at the head isn't overtaken by narrow ones behind it: it would wait for ever.

Nobody starves: a request that has been overtaken by `MAX_OVERTAKEN` later ones in a row goes next,
whatever its priority. That, and not a priority that rises with time, because a bound in time turns
a long queue of low priority into one that arrives before everybody else's; a share doesn't.

Waits are estimated as the work ahead, (units ahead) x (mean time a unit is held) less the time that
what runs has been held already, over the units that run at once. Unlike a rate of departures that
holds in a burst's first second too, and after workers came or went. It is a lower bound: it counts
as if what runs when the request's turn comes had only just begun, and only requests that have ended
make the mean. A deadline is refused only when not even that fits: too few are, never too many.

All calls come from one event loop.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from millstream_server.runtime import metrics
from millstream_server.runtime.errors import NoWorkerError, OverloadedError
from millstream_server.runtime.places import Ask, Place, Priority, State

MAX_OVERTAKEN = 7
_ENOUGH = 8
"""So many requests must have ended before a wait is estimated."""
_MEMORY = 32
"""The mean follows about so many units."""
_UNKNOWN_DELAY_S = 1.0
_MIN_DELAY_S, _MAX_DELAY_S = 0.1, 30.0
_JITTER = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueLimits:
    """Bounds of one queue."""

    max_running: int = 0
    """Units that run at once; 0: the present capacity."""
    max_queued: int = 1024
    """Requests that wait."""
    max_queued_tokens: int = 32 << 20
    """Tokens that waiting requests may take."""
    comeback_s: float = 30.0
    """How long requests wait on when all capacity is gone: a worker may be back in a moment."""


class _Lane:
    """Waiting places of one priority, in order of arrival."""

    __slots__ = ("places", "tokens", "units", "widths")

    def __init__(self) -> None:
        self.places: OrderedDict[int, Place] = OrderedDict()
        self.widths: Counter[int] = Counter()
        self.units = 0
        self.tokens = 0

    def add(self, place: Place) -> None:
        self.places[place.number] = place
        self.widths[place.ask.units] += 1
        self.units += place.ask.units
        self.tokens += place.ask.tokens

    def remove(self, place: Place) -> None:
        del self.places[place.number]
        self.widths[place.ask.units] -= 1
        self.units -= place.ask.units
        self.tokens -= place.ask.tokens

    @property
    def first(self) -> Place:
        return next(iter(self.places.values()))

    @property
    def last(self) -> Place:
        return next(reversed(self.places.values()))


class AdmissionQueue:
    """One model's requests."""

    def __init__(
        self,
        name: str,
        limits: QueueLimits,
        capacity: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``capacity`` answers how many units can run now; call `changed` when it has changed."""
        self.running = 0
        """Units that run."""
        self._limits = limits
        self._capacity = capacity
        self._clock = clock
        self._lanes = {priority: _Lane() for priority in sorted(Priority, reverse=True)}
        self._arrivals = 0
        self._overtaken = 0
        self._running_widths: Counter[int] = Counter()
        self._started_s = 0.0
        """Sum over the units that run of when they began."""
        self._ended = 0
        self._held_units = 0
        self._mean_held_s = 0.0
        self._comeback: asyncio.TimerHandle | None = None
        self._metrics = _Metrics(name)

    @property
    def queued(self) -> int:
        """Requests that wait."""
        return sum(len(lane.places) for lane in self._lanes.values())

    @property
    def queued_tokens(self) -> int:
        """Tokens that waiting requests may take."""
        return sum(lane.tokens for lane in self._lanes.values())

    @property
    def limit(self) -> int:
        """Units that may run at once now."""
        capacity = self._capacity()
        return (self._limits.max_running or capacity) if capacity else 0

    @property
    def utilization(self) -> float:
        """Units that run or wait over those that may run; 1 while none may."""
        limit = self.limit
        waiting = sum(lane.units for lane in self._lanes.values())
        return (self.running + waiting) / limit if limit else 1.0

    def enter(self, ask: Ask) -> Place:
        """Take a request in: it runs or waits.

        Raises:
            OverloadedError: the queue is full, or longer than the time the request has.
        """
        place = Place(ask, self._arrivals, self._clock(), self._leave)
        self._arrivals += 1
        if self._may_pass(ask.priority) and self._fits(ask.units):
            self._run(place)
            return place
        self._check_deadline(ask)
        self._make_room(ask)
        self._lanes[ask.priority].add(place)
        self._metrics.queued(1, ask.tokens)
        self.changed()  # whom it displaced may have been what it waited for
        return place

    def _leave(self, place: Place) -> None:
        if place.runs:
            self._count(place, -1)
            self._learn(place.ask.units, place.turn(State.LEFT, self._clock()))
        elif place.waits:
            self._forget(place)
            place.turn(State.LEFT, self._clock())
        else:
            return
        self._let_through()

    def changed(self) -> None:
        """The capacity has changed: let those through that fit now."""
        if self._capacity():
            if self._comeback:
                self._comeback.cancel()
                self._comeback = None
            self._let_through()
        elif self.queued and not self._comeback:
            self._comeback = asyncio.get_running_loop().call_later(
                self._limits.comeback_s, self._give_up
            )

    # ---- order -----------------------------------------------------------------------------------

    def _heads(self) -> list[Place]:
        """Each priority's first, the highest priority's before the others'."""
        return [lane.first for lane in self._lanes.values() if lane.places]

    def _next(self) -> Place | None:
        """Say whose turn it is, who may not fit yet."""
        heads = self._heads()
        if not heads:
            return None
        return min(heads, key=_by_arrival) if self._overtaken >= MAX_OVERTAKEN else heads[0]

    def _may_pass(self, priority: Priority) -> bool:
        """Whether a newcomer would be the next: only lower ones wait, and they still can."""
        heads = self._heads()
        return not heads or (heads[0].ask.priority < priority and self._overtaken < MAX_OVERTAKEN)

    def _fits(self, units: int) -> bool:
        limit = self.limit
        # One that is wider than everything there is runs alone.
        return self.running + units <= limit or (limit > 0 and not self.running)

    def _let_through(self) -> None:
        while (place := self._next()) and self._fits(place.ask.units):
            self._forget(place)
            self._run(place)

    def _run(self, place: Place) -> None:
        overtakes = any(head.number < place.number for head in self._heads())
        self._overtaken = self._overtaken + 1 if overtakes else 0
        place.waited_s = place.turn(State.RUNS, self._clock())
        self._count(place, 1)
        self._metrics.waited(place)

    def _count(self, place: Place, requests: int) -> None:
        """Count one that runs in (1) or out (-1)."""
        units = requests * place.ask.units
        self.running += units
        self._running_widths[place.ask.units] += requests
        self._started_s = self._started_s + units * place.since_s if self.running else 0.0
        self._metrics.running(units)

    def _forget(self, place: Place) -> None:
        """Take it out of its lane."""
        self._lanes[place.ask.priority].remove(place)
        self._metrics.queued(-1, -place.ask.tokens)

    def _give_up(self) -> None:
        """No worker came back."""
        self._comeback = None
        for lane in self._lanes.values():
            for place in list(lane.places.values()):
                place.fail(
                    NoWorkerError(
                        "every worker for this model went away while the request waited to run, "
                        f"and none was back within {self._limits.comeback_s:.0f} s; retry",
                        retry_delay_s=self._delay_s(),
                    )
                )

    # ---- bounds ----------------------------------------------------------------------------------

    def _make_room(self, ask: Ask) -> None:
        """See that one more can wait, at the cost of lower ones if need be."""
        limits = self._limits
        count, tokens = self.queued + 1, self.queued_tokens + ask.tokens
        lower = [lane for priority, lane in self._lanes.items() if priority < ask.priority]
        if count - sum(len(lane.places) for lane in lower) > limits.max_queued:
            self._refuse("requests", f"as many requests wait as may ({limits.max_queued})")
        if tokens - sum(lane.tokens for lane in lower) > limits.max_queued_tokens:
            self._refuse(
                "tokens",
                f"this request's {ask.tokens} tokens and those of the requests that wait already "
                f"are more than {limits.max_queued_tokens}",
            )
        for lane in reversed(lower):
            while lane.places and (count > limits.max_queued or tokens > limits.max_queued_tokens):
                last = lane.last
                count, tokens = count - 1, tokens - last.ask.tokens
                metrics.ADMISSION_REFUSED.labels("displaced").inc()
                last.fail(self._overload("requests of higher priority took this one's place"))

    def _check_deadline(self, ask: Ask) -> None:
        wait_s = self.expected_wait_s(ask)
        if ask.timeout_s is not None and wait_s is not None and ask.timeout_s < wait_s:
            self._refuse(
                "deadline",
                f"this request would wait about {wait_s:.1f} s to run, and its deadline is in "
                f"{max(ask.timeout_s, 0):.1f} s",
            )

    def _refuse(self, cause: str, why: str) -> None:
        metrics.ADMISSION_REFUSED.labels(cause).inc()
        raise self._overload(why)

    def _overload(self, why: str) -> OverloadedError:
        return OverloadedError(
            f"the server is busy: {why}; retry later", retry_delay_s=self._delay_s()
        )

    # ---- estimates -------------------------------------------------------------------------------

    def _learn(self, units: int, held_s: float) -> None:
        self._ended += 1
        self._held_units = min(self._held_units + units, _MEMORY)
        share = min(1.0, units / self._held_units)
        self._mean_held_s += (held_s - self._mean_held_s) * share

    def expected_wait_s(self, ask: Ask) -> float | None:
        """Estimate how long a newcomer waits at least; None while there is too little to go by."""
        limit = self.limit
        if self._ended < _ENOUGH or not limit:
            return None
        running = _room(self._running_widths, limit)
        ahead = [lane.widths for p, lane in self._lanes.items() if p >= ask.priority]
        waiting = sum(_room(widths, limit) for widths in ahead)
        missing = running + waiting + min(ask.units, limit) - limit
        held_s = self._clock() - self._started_s / self.running if self.running else 0.0
        # Those held for longer than the mean may be stuck: they take off no more.
        work_s = missing * self._mean_held_s - running * min(held_s, self._mean_held_s)
        return max(0.0, work_s) / limit

    def _delay_s(self) -> float:
        """Tell a refused client when to come back: when half of the queue will be through.

        Sooner, it would find the queue full again; later, the queue might run dry.
        """
        whole_s = self.expected_wait_s(Ask(priority=Priority.LOW))
        return jittered(_UNKNOWN_DELAY_S if whole_s is None else whole_s / 2)


class _Metrics:
    """One queue's series."""

    def __init__(self, name: str) -> None:
        self._running = metrics.ADMISSION_RUNNING.labels(name)
        self._queued = metrics.ADMISSION_QUEUED.labels(name)
        self._tokens = metrics.ADMISSION_QUEUED_TOKENS.labels(name)
        self._wait = {p: metrics.ADMISSION_WAIT.labels(name, p.name.lower()) for p in Priority}

    def queued(self, requests: int, tokens: int) -> None:
        self._queued.inc(requests)
        self._tokens.inc(tokens)

    def running(self, units: int) -> None:
        self._running.inc(units)

    def waited(self, place: Place) -> None:
        self._wait[place.ask.priority].observe(place.waited_s)


def jittered(delay_s: float) -> float:
    """Bound a retry's delay to 0.1 to 30 s and spread it, so that clients don't return in step."""
    bounded = min(max(delay_s, _MIN_DELAY_S), _MAX_DELAY_S)
    return bounded * random.uniform(1 - _JITTER, 1 + _JITTER)  # noqa: S311 - no secret


def _room(widths: Counter[int], limit: int) -> int:
    """Count the units that requests of these widths fill; one wider than all there is, all."""
    return sum(min(width, limit) * requests for width, requests in widths.items())


def _by_arrival(place: Place) -> int:
    return place.number
