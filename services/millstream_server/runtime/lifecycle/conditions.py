"""Why a process doesn't serve: named conditions, joined into its health in one place.

A process serves while no condition holds. Each condition has exactly one owner, which sets and
clears it: the worker's host owns `LOADING`, the engine's watch owns `STUCK`, and so on.
"""

from __future__ import annotations

from collections.abc import Callable

from millstream_server.runtime.telemetry.log import get_log

LOADING = "loading"
"""The model is being loaded or warmed up; at a Processor: the models' text files are being read."""
DRAINING = "draining"
"""The process is shutting down; never cleared."""
STUCK = "stuck"
"""The engine makes no progress."""
PORT_FAILED = "port failed"
"""gRPC accepts nothing more on the service's own port; never cleared: a new process is needed."""
NO_WORKERS = "no workers"
"""Processor only: a model has no worker of a role that it needs."""
VERSIONS_DIFFER = "weight versions differ"
"""Processor only: a model has both, but no prefill and decode worker with the same weights."""

log = get_log(__name__)


class HealthCondition:
    """One reason not to serve. Only its owner sets and clears it."""

    __slots__ = ("_changed", "_holds", "name")

    def __init__(
        self, name: str, changed: Callable[[HealthCondition], None], *, holds: bool
    ) -> None:
        """Use `HealthConditions.own` to make one."""
        self.name = name
        self._changed = changed
        self._holds = holds

    @property
    def holds(self) -> bool:
        return self._holds

    def set(self, *, holds: bool = True) -> None:
        if holds is not self._holds:
            self._holds = holds
            self._changed(self)

    def clear(self) -> None:
        self.set(holds=False)


class HealthConditions:
    """All conditions of a process. All calls come from one event loop."""

    def __init__(self, on_change: Callable[[bool], None]) -> None:
        """Start without conditions.

        ``on_change`` is called with True when the last condition is cleared, and with False when
        the first is set. A process doesn't serve before the first call with True.
        """
        self._on_change = on_change
        self._conditions: dict[str, HealthCondition] = {}
        self._served = False

    def own(self, name: str, *, holds: bool = False) -> HealthCondition:
        """Add a condition and return it; the caller is its owner.

        Raises:
            ValueError: the condition has an owner already.
        """
        if name in self._conditions:
            message = f"the health condition {name!r} has an owner already"
            raise ValueError(message)
        condition = self._conditions[name] = HealthCondition(name, self._changed, holds=holds)
        if holds:
            self._join()
        return condition

    @property
    def holding(self) -> tuple[str, ...]:
        """Names of the conditions that hold, in the order in which they were added."""
        return tuple(name for name, condition in self._conditions.items() if condition.holds)

    @property
    def serving(self) -> bool:
        return not self.holding

    def _changed(self, condition: HealthCondition) -> None:
        log.info(
            "health condition changed",
            condition=condition.name,
            holds=condition.holds,
            conditions=",".join(self.holding),
        )
        self._join()

    def _join(self) -> None:
        if self.serving is not self._served:
            self._served = self.serving
            self._on_change(self._served)
