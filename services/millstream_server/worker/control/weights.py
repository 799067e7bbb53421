"""UpdateWeights: received or found, checked, then put in while no request is open."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from millstream_server.control.operations import (
    BroadcastWeights,
    DiskWeights,
    IpcWeights,
    MemoryTag,
    WeightControl,
    WeightSource,
)
from millstream_server.runtime.errors import (
    InvalidRequestError,
    OperationConflictError,
)
from millstream_server.worker.control.directories import AllowedDirectories
from millstream_server.worker.control.memory import MemoryOperations
from millstream_server.worker.control.operations import Operations, Report, Stage
from millstream_server.worker.control.receive import Received, TensorsInCall, check_tensor
from millstream_server.worker.control.service_stop import Cause, ServiceStop
from millstream_server.worker.control.supported import REFUSALS, SupportedControls
from millstream_server.worker.control.weights_record import WeightsRecord

_MAX_VERSION = 128
_BACKENDS = ("nccl", "gloo")
_SMALLEST_GROUP = 2


@dataclass(frozen=True, slots=True)
class DirectoryNamed:
    """A checkpoint directory as its caller names it."""

    path: str


Source = DirectoryNamed | TensorsInCall | BroadcastWeights | IpcWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """What UpdateWeights is asked for."""

    version: str
    source: Source
    timeout_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Updated:
    """What an update did."""

    previous_version: str
    version: str
    out_of_service_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerWeights:
    """A worker's weights: where their version is known, and what may replace them."""

    read_version: Callable[[], str]
    write_version: Callable[[str], None]
    """Tells all who follow the worker's info."""
    directories: AllowedDirectories
    max_bytes: int
    """Of tensors that are sent."""
    record: WeightsRecord
    """Notes updates from disk for a restart."""


class WeightOperations:
    """Replaces the engine's weights."""

    def __init__(
        self,
        operations: Operations,
        stop: ServiceStop,
        controls: SupportedControls,
        memory: MemoryOperations,
        weights: WorkerWeights,
    ) -> None:
        """Replace nothing yet."""
        self._operations = operations
        self._stop = stop
        self._controls = controls
        self._memory = memory
        self._weights = weights
        self._unknown = False
        """An update failed in a way that leaves open which weights the engine has."""

    async def update(self, report: Report, update: Update) -> Updated:
        """Check new weights, then replace the old ones out of service.

        Raises:
            InvalidRequestError: it can't succeed as sent.
            InvalidWeightsError: the weights don't fit; the old ones serve on.
            DeadlinePassedError: requests are still open; the old ones serve on.
            OperationConflictError: another operation runs, the weights' memory is released, or the
            open requests are paused.
            UnsupportedFeatureError: the engine can't, or not from this source.
            ServingError: the engine failed to. Which weights it has isn't known: the worker stays
            out of service until another update succeeds.
        """
        control: WeightControl = self._controls.require("UpdateWeights", lambda c: c.weights)
        with self._operations.one("UpdateWeights", report) as operation:
            previous = self._weights.read_version()
            self._check(update.version, previous)
            source = await self._prepared(update.source, report)
            await control.check_weights(source, report.count)
            out_since_s = time.monotonic()
            self._stop.take_out(Cause.WEIGHTS)
            try:
                report.enter(Stage.DRAINING)
                await self._stop.until_idle(update.timeout_s)
                await operation.apply(self._replace(control, source, update.version))
            finally:
                if not self._unknown:
                    self._stop.put_back(Cause.WEIGHTS)
            return Updated(
                previous_version=previous,
                version=update.version,
                out_of_service_s=time.monotonic() - out_since_s,
            )

    def _check(self, version: str, current: str) -> None:
        field = "start.weight_version"
        if not 1 <= len(version) <= _MAX_VERSION or not version.isprintable():
            raise InvalidRequestError.of(
                field, f"must have 1 to {_MAX_VERSION} printable characters"
            )
        if version == current and not self._unknown:
            raise InvalidRequestError.of(field, f"{version} is the current one; name another")
        if MemoryTag.WEIGHTS in self._memory.released:
            raise OperationConflictError(
                "the weights' memory is released; call ResumeMemory with the tag WEIGHTS first"
            )

    async def _prepared(self, source: Source, report: Report) -> WeightSource:
        match source:
            case TensorsInCall():
                return await Received(self._weights.max_bytes, report.count).all_of(source)
            case DirectoryNamed(path):
                found = await self._weights.directories.resolve("start.disk.path", path)
                return DiskWeights(found)
            case BroadcastWeights():
                _check_broadcast(source)
            case IpcWeights():
                if not source.zmq_addresses:
                    raise InvalidRequestError.of("start.ipc.zmq_addresses", "must have an address")
        return source

    async def _replace(self, control: WeightControl, source: WeightSource, version: str) -> None:
        record = self._weights.record
        files = await record.about_to_load(source.path) if isinstance(source, DiskWeights) else {}
        before, self._unknown = self._unknown, True
        try:
            await control.update_weights(source, version)
        except REFUSALS:
            self._unknown = before  # refused: the old ones are in place
            raise
        self._unknown = False
        self._weights.write_version(version)
        if isinstance(source, DiskWeights):
            await record.note(version, source.path, files)
        else:
            await record.clear()


def _check_broadcast(source: BroadcastWeights) -> None:
    field = "start.broadcast"
    host, _, port = source.master_address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise InvalidRequestError.of(f"{field}.master_address", "must be HOST:PORT")
    if source.world_size < _SMALLEST_GROUP or source.rank_offset >= source.world_size:
        raise InvalidRequestError.of(
            f"{field}.world_size",
            f"is {source.world_size}, and rank_offset is {source.rank_offset}; a group has at "
            f"least {_SMALLEST_GROUP} processes and rank_offset is below world_size",
        )
    if not source.group_name:
        raise InvalidRequestError.of(f"{field}.group_name", "must be set")
    if source.backend not in _BACKENDS:
        raise InvalidRequestError.of(f"{field}.backend", f"must be one of {', '.join(_BACKENDS)}")
    if not source.tensors:
        raise InvalidRequestError.of(f"{field}.tensors", "must have at least one tensor")
    names: set[str] = set()
    for number, tensor in enumerate(source.tensors):
        check_tensor(f"{field}.tensors[{number}]", tensor, names)
