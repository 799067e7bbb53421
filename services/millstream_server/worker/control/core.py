"""What operators can do with one worker: all operations, their common state, the shutdown."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from millstream_server.control.operations import LoraAdapter, MemoryTag
from millstream_server.runtime.lifecycle.conditions import HealthConditions
from millstream_server.worker.control.in_service import (
    AdapterList,
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
from millstream_server.worker.control.weights import (
    WeightOperations,
    WorkerWeights,
)
from millstream_server.worker.control.weights_record import WeightsRecord
from millstream_server.worker.host import WorkerHost


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineState:
    """What operations have set."""

    drained: bool
    paused: bool
    released: frozenset[MemoryTag]
    weight_version: str
    adapters: tuple[LoraAdapter, ...]
    profiling: bool
    open_requests: int
    operation: str
    """The one that runs, by the name of its RPC; empty: none."""
    supported: tuple[str, ...]


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
        self._host = host
        self._plan = host.control
        options = self._plan.options
        self._limit_s = options.operation_limit_s
        self._operations = operations = Operations()
        self._controls = controls = SupportedControls(self._plan.controls, host.loaded)
        self._stop = stop = ServiceStop(host.work, host.silence, conditions, propagation_s)
        self.drain = DrainOperations(operations, stop)
        self.pause = PauseOperations(operations, stop, controls)
        self.cache = CacheOperations(operations, stop, controls)
        self.memory = MemoryOperations(operations, stop, controls)
        self.profile = ProfileOperations(operations, controls, options.profile_dir)
        self.adapters = AdapterOperations(
            operations,
            stop,
            controls,
            AdapterList(read=self._adapters, write=self._set_adapters),
            options.directories,
        )
        self.weights = WeightOperations(
            operations,
            stop,
            controls,
            self.memory,
            WorkerWeights(
                read_version=self._version,
                write_version=self._set_version,
                directories=options.directories,
                max_bytes=options.max_weights_bytes,
                record=WeightsRecord(options.weights_record, options.model_path),
            ),
        )
        host.silence.expected = self.expects_silence
        host.work.when_leaving(self._leave)

    def state(self) -> EngineState:
        """Return what operations have set.

        Raises:
            UnavailableError: the model is being loaded.
        """
        return EngineState(
            drained=self._stop.holds(Cause.DRAINED),
            paused=self.pause.paused,
            released=self.memory.released,
            weight_version=self._version(),
            adapters=self._adapters(),
            profiling=self.profile.recording,
            open_requests=self._stop.open_requests,
            operation=self._operations.current,
            supported=self._controls.names(),
        )

    def report(self) -> OperationReport:
        """Make what follows an operation for its caller."""
        return OperationReport(lambda: self._stop.open_requests)

    def expects_silence(self) -> bool:
        """Return whether the engine may make no progress and still be well.

        It is paused, without memory, or being changed; the latter counts for a limited time only.
        """
        changing_s = self._operations.changing_s
        if changing_s is not None:
            return changing_s < self._limit_s
        return self._stop.holds(Cause.PAUSED) or bool(self.memory.released)

    async def until_done(self, limit_s: float) -> bool:
        """Wait for an operation that changes the engine; return whether none is left."""
        return await self._operations.busy.until_idle(limit_s)

    def close(self) -> None:
        """End what still runs: the engine is about to be closed."""
        self._operations.cut()

    def _leave(self) -> None:
        self._operations.leave()
        self.pause.leave()

    # ---- what the worker tells of its engine -----------------------------------------------------

    def _version(self) -> str:
        version: str = self._host.loaded().weight_version
        return version

    def _set_version(self, version: str) -> None:
        self._host.set_info(replace(self._host.loaded(), weight_version=version))

    def _adapters(self) -> tuple[LoraAdapter, ...]:
        return self._plan.adapters(self._host.loaded())

    def _set_adapters(self, adapters: tuple[LoraAdapter, ...]) -> None:
        self._host.set_info(self._plan.with_adapters(self._host.loaded(), adapters))
