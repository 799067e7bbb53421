"""Drain and Undrain: out of service until an operator says otherwise; no engine is needed."""

from __future__ import annotations

from millstream_server.runtime.errors import DeadlinePassedError, OperationConflictError
from millstream_server.worker.control.operations import Operations, Report, Stage
from millstream_server.worker.control.service_stop import Cause, ServiceStop

_NAME = "Drain"


class DrainOperations:
    """Takes the worker out of service, and back."""

    def __init__(self, operations: Operations, stop: ServiceStop) -> None:
        """Start in service."""
        self._operations = operations
        self._stop = stop
        self._waiting = 0
        self._settled = False
        """Whether it stays drained without a caller who waits."""

    async def drain(self, report: Report, timeout_s: float | None) -> None:
        """Take the worker out of service and wait until no request is open.

        If the last caller goes away before, it is back in service.

        Raises:
            DeadlinePassedError: requests are still open; it stays out of service.
            OperationConflictError: another operation runs, or `undrain` was called.
        """
        with self._operations.one(_NAME, report, together=True):
            self._stop.take_out(Cause.DRAINED)
            report.enter(Stage.DRAINING)
            self._waiting += 1
            try:
                await self._stop.until_idle(timeout_s, for_engine=False)
                self._settled = True
            except DeadlinePassedError:
                self._settled = True
                raise
            finally:
                self._waiting -= 1
                if not (self._settled or self._waiting):
                    self._stop.put_back(Cause.DRAINED)

    def undrain(self) -> bool:
        """Put the worker back into service; return whether it was drained."""
        was_drained = self._stop.holds(Cause.DRAINED)
        self._settled = False
        self._stop.put_back(Cause.DRAINED)
        self._operations.interrupt(
            _NAME, OperationConflictError("Undrain has put the worker back into service")
        )
        return was_drained
