"""Whether a worker accepts requests, and if not, why."""

from __future__ import annotations

import enum
from collections.abc import Callable

from millstream_server.engines.base import WorkerDescription
from millstream_server.routing.workers import WorkerView
from millstream_server.runtime.telemetry.log import get_log
from millstream_server.runtime.telemetry.metrics import WORKERS_CONNECTED, WORKERS_LOST

log = get_log(__name__)


class WorkerCondition(enum.Enum):
    """Why a worker gets no new requests."""

    NOT_CONNECTED = "not connected"
    NOT_SERVING = "not serving"
    """Its health isn't known to be SERVING; for instance, its engine may be stuck."""
    SILENT = "silent"
    """It has stopped reporting its load."""
    DRAINING = "draining"
    """It is shutting down."""
    RETIRED = "retired"
    """Discovery no longer names it."""


_EXPECTED = frozenset({WorkerCondition.DRAINING, WorkerCondition.RETIRED})


class WorkerStatus:
    """Sets `WorkerView.description` from conditions and description: None while one holds."""

    def __init__(self, view: WorkerView, on_change: Callable[[], None]) -> None:
        """Start as not connected; ``on_change`` is called after a change of `view.description`."""
        self.conditions = {WorkerCondition.NOT_CONNECTED}
        self._view = view
        self._on_change = on_change
        self._description: WorkerDescription | None = None

    @property
    def retired(self) -> bool:
        """Whether discovery no longer names the worker."""
        return WorkerCondition.RETIRED in self.conditions

    def connected(self, description: WorkerDescription) -> None:
        """Record a new connection; the worker accepts no requests before its health is SERVING."""
        self._description = description
        self.conditions = {WorkerCondition.NOT_SERVING} | (
            self.conditions & {WorkerCondition.RETIRED}
        )
        log.info(
            "worker connected",
            worker=self._view.address,
            id=description.worker_id,
            role=description.role.value,
            model=description.model,
        )
        self._update()

    def disconnected(self, *, expected: bool) -> None:
        """Record that the connection has ended; ``expected``: because this process closed it."""
        description, self._description = self._description, None
        if description and not self.conditions & _EXPECTED:
            log.warning(
                "worker disconnected",
                worker=self._view.address,
                open_requests=self._view.in_flight,
            )
            if not expected:
                WORKERS_LOST.labels(description.role.value).inc()
        self.conditions = {WorkerCondition.NOT_CONNECTED} | (
            self.conditions & {WorkerCondition.RETIRED}
        )
        self._view.report(None)
        self._update()

    def describe(self, description: WorkerDescription) -> None:
        """Set the worker's current description.

        Raises:
            ValueError: its role has changed, which needs a new connection.
        """
        known = self._description
        if known is None or description == known:
            return
        if description.role is not known.role:
            message = f"the worker was {known.role.value} and is now {description.role.value}"
            raise ValueError(message)
        self._description = description
        self._update()

    def set(self, condition: WorkerCondition) -> None:
        """Record that a condition holds."""
        if condition not in self.conditions:
            self.conditions.add(condition)
            write = log.warning if condition is WorkerCondition.SILENT else log.info
            write("worker condition set", worker=self._view.address, condition=condition.value)
            self._update()

    def clear(self, condition: WorkerCondition) -> None:
        """Record that a condition no longer holds."""
        if condition in self.conditions:
            self.conditions.remove(condition)
            log.info(
                "worker condition cleared", worker=self._view.address, condition=condition.value
            )
            self._update()

    def _update(self) -> None:
        view = self._view
        before, now = view.description, None if self.conditions else self._description
        if before is now:
            return
        view.description = now
        view.last_description = now or view.last_description
        for description, count in ((before, -1), (now, 1)):
            if description is not None:
                WORKERS_CONNECTED.labels(description.model, description.role.value).inc(count)
        self._on_change()
