"""One request's admission, and how long capacity is held.

An admission waits, runs, and releases its capacity.
"""

from __future__ import annotations

import asyncio
import enum
from collections import Counter
from collections.abc import Callable, Iterable

from millstream_server.runtime.errors import DeadlinePassedError, Failure
from millstream_server.runtime.priority import Priority

_ENOUGH = 8
"""Number of requests that must have ended before a wait is estimated."""
_MEMORY = 32
"""The mean is over about this many units."""


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

    __slots__ = (
        "_decided",
        "_error",
        "_leave",
        "_timeout_s",
        "number",
        "priority",
        "since_s",
        "state",
        "tokens",
        "units",
    )

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
        """Whether it is in the queue."""
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


class HeldTime:
    """Running requests, and the mean time that a unit was held. Times are on the queue's clock."""

    def __init__(self) -> None:
        """Start without data."""
        self._running: Counter[int] = Counter()
        """Number of running requests by their width in units."""
        self._running_units = 0
        self._started_s = 0.0
        """Sum of the running units' start times."""
        self._ended = 0
        self._held_units = 0
        self._mean_s = 0.0

    def begin(self, units: int, now_s: float) -> None:
        """Add a request that starts to run."""
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

        None without enough data; see `queue.admission_queue` for the formula.
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
