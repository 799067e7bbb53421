"""How long capacity is held, and the estimate of a new request's wait."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

_ENOUGH = 8
"""Number of requests that must have ended before a wait is estimated."""
_MEMORY = 32
"""The mean is over about this many units."""


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

    def end(self, units: int, since_s: float, held_s: float) -> None:
        """Remove a request that started at ``since_s`` and was held for ``held_s``."""
        self._running[units] -= 1
        self._running_units -= units
        self._started_s = self._started_s - units * since_s if self._running_units else 0.0
        self._ended += 1
        self._held_units = min(self._held_units + units, _MEMORY)
        share = min(1.0, units / self._held_units)
        self._mean_s += (held_s - self._mean_s) * share

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
