"""What operators can do with one worker: all operations, their common state, the shutdown."""

from __future__ import annotations

from typing import Any

from millstream_server.runtime.lifecycle.conditions import HealthConditions
from millstream_server.worker.control.in_service import (
    AdapterOperations,
    ProfileOperations,
)
from millstream_server.worker.control.operations import (
    Cause,
    OperationReport,
    Operations,
    ServiceStop,
    SupportedControls,
)
from millstream_server.worker.control.out_of_service import (
    CacheOperations,
    DrainOperations,
    MemoryOperations,
    PauseOperations,
)
from millstream_server.worker.control.weights import WeightOperations
from millstream_server.worker.host import WorkerHost


class ControlCore:
    """All operations of one worker. All calls come from one event loop.

    The caller of an operation may cancel it: before it changes the engine it is undone; after that
    it goes on to its end, and the cancelled call with it.
    """

    def __init__(
        self, host: WorkerHost[Any], conditions: HealthConditions, propagation_s: float
    ) -> None:
        """Control the engine of ``host``; add the health conditions of `Cause`.

        New requests are accepted for ``propagation_s`` after the worker has left service.
        """
        self.host = host
        plan = host.plan.control
        self._limit_s = plan.operation_limit_s
        self.operations = operations = Operations()
        self.controls = controls = SupportedControls(plan.controls, host.loaded)
        self.stop = stop = ServiceStop(host.work, host.silence, conditions, propagation_s)
        shared = (operations, stop, controls)
        self.drain = DrainOperations(*shared)
        self.pause = PauseOperations(*shared)
        self.cache = CacheOperations(*shared)
        self.memory = MemoryOperations(*shared)
        self.profile = ProfileOperations(*shared, plan.profile_dir)
        self.adapters = AdapterOperations(*shared, host, plan.directories)
        self.weights = WeightOperations(*shared, host, self.memory)
        host.silence.expected = self.expects_silence
        host.work.when_leaving(self._leave)

    def report(self) -> OperationReport:
        return OperationReport(lambda: self.stop.open_requests)

    def expects_silence(self) -> bool:
        """Return whether the engine may make no progress and still be well.

        It is paused, without memory, or being changed; the latter counts for a limited time only.
        """
        changing_s = self.operations.changing_s
        if changing_s is not None:
            return changing_s < self._limit_s
        return self.stop.holds(Cause.PAUSED) or bool(self.memory.released)

    async def until_done(self, limit_s: float) -> bool:
        """Wait for an operation that changes the engine; return whether none is left."""
        return await self.operations.busy.until_idle(limit_s)

    def close(self) -> None:
        """End what still runs: the engine is about to be closed."""
        self.operations.cut()

    def _leave(self) -> None:
        self.operations.leave()
        self.pause.leave()
