"""UpdateWeights: received or found, checked, then put in while no request is open."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from millstream_server.control.operations import (
    BroadcastWeights,
    DiskWeights,
    IpcWeights,
    MemoryTag,
    NamedTensor,
    TensorWeights,
    WeightControl,
    WeightSource,
)
from millstream_server.runtime.errors import (
    DeadlinePassedError,
    InvalidRequestError,
    OperationConflictError,
)
from millstream_server.worker.control.operations import (
    REFUSALS,
    Cause,
    OperationKind,
    OperationReport,
    OperationStage,
)
from millstream_server.worker.control.out_of_service import MemoryOperations
from millstream_server.worker.control.weights_record import WeightsRecord
from millstream_server.worker.host import WorkerHost

_SILENCE_S = 60.0
"""Longest wait for the next piece: an operation that waits keeps all others from beginning."""
_MAX_NAME = 512
_MAX_TENSORS = 1 << 17


@dataclass(frozen=True, slots=True)
class Piece:
    """The next bytes of the tensor that began last."""

    offset: int
    data: bytes


@dataclass(frozen=True, slots=True)
class TensorsInCall:
    """Tensors that the caller sends: each begins with a `NamedTensor`; its pieces follow."""

    parts: AsyncIterator[NamedTensor | Piece]
    total_bytes: int = 0
    """Of all tensors together; 0: not known."""


class Received:
    """Tensors of one call; all of them are held in memory, so their bytes are limited."""

    def __init__(self, max_bytes: int, progress: Callable[[int, int], None]) -> None:
        """Hold ``max_bytes`` at most; ``progress`` gets the bytes received and in all."""
        self._max_bytes = max_bytes
        self._progress = progress
        self._tensors: list[tuple[NamedTensor, bytearray]] = []
        self._names: set[str] = set()
        self._announced = 0
        self._done = 0

    async def all_of(self, source: TensorsInCall) -> TensorWeights:
        """Receive all tensors of a call.

        Raises:
            InvalidRequestError: a rule is broken, or the tensors are too large.
            DeadlinePassedError: nothing came for a minute.
        """
        self._check_total(source.total_bytes)
        parts = aiter(source.parts)
        while (part := await _next_part(parts)) is not None:
            if isinstance(part, NamedTensor):
                self._begin(part)
            else:
                self._add(part)
            self._progress(self._done, source.total_bytes)
        self._check_complete()
        if not self._tensors:
            raise InvalidRequestError.of("tensor", "no tensor came; send at least one")
        if source.total_bytes not in {0, self._done}:
            raise InvalidRequestError.of(
                "start.tensors.total_bytes",
                f"is {source.total_bytes}, but the tensors have {self._done} bytes",
            )
        return TensorWeights(self._tensors)

    def _begin(self, tensor: NamedTensor) -> None:
        self._check_complete()
        check_tensor("tensor", tensor, self._names)
        if len(self._names) > _MAX_TENSORS:
            raise InvalidRequestError.of("tensor", f"is one more than the {_MAX_TENSORS} allowed")
        self._announced += tensor.spec.nbytes
        self._check_total(self._announced)
        # It grows with what comes: gigabytes at once would stop the event loop for seconds.
        self._tensors.append((tensor, bytearray()))

    def _add(self, piece: Piece) -> None:
        if not self._tensors:
            raise InvalidRequestError.of("chunk", "came before the first `tensor`")
        tensor, data = self._tensors[-1]
        if piece.offset != len(data):
            raise InvalidRequestError.of(
                "chunk.offset", f"is {piece.offset}; {tensor.name} goes on at {len(data)}"
            )
        end = len(data) + len(piece.data)
        if end > tensor.spec.nbytes:
            raise InvalidRequestError.of(
                "chunk.data", f"ends at {end}; {tensor.name} has {tensor.spec.nbytes} bytes"
            )
        data += piece.data
        self._done += len(piece.data)

    def _check_complete(self) -> None:
        if not self._tensors:
            return
        tensor, data = self._tensors[-1]
        if len(data) < tensor.spec.nbytes:
            raise InvalidRequestError.of(
                "tensor", f"{tensor.name} has {tensor.spec.nbytes} bytes; only {len(data)} came"
            )

    def _check_total(self, total: int) -> None:
        if total > self._max_bytes:
            raise InvalidRequestError.of(
                "tensor",
                f"the tensors have {total} bytes or more; the worker's --max-weights-bytes allows "
                f"{self._max_bytes}: update from disk or send fewer tensors",
            )


def check_tensor(field: str, tensor: NamedTensor, names: set[str]) -> None:
    """Check a tensor's name and description; add its name to ``names``.

    Raises:
        InvalidRequestError: they can't be, or the name was there already.
    """
    name = tensor.name
    if not 1 <= len(name) <= _MAX_NAME or not name.isprintable():
        raise InvalidRequestError.of(f"{field}.name", f"must have 1 to {_MAX_NAME} characters")
    if name in names:
        raise InvalidRequestError.of(f"{field}.name", f"{name} came already; send it once")
    if problem := tensor.spec.problem():
        raise InvalidRequestError.of(f"{field}.spec", f"{name} {problem}")
    names.add(name)


async def _next_part(parts: AsyncIterator[NamedTensor | Piece]) -> NamedTensor | Piece | None:
    try:
        async with asyncio.timeout(_SILENCE_S):
            return await anext(parts, None)
    except TimeoutError:
        raise DeadlinePassedError(
            f"no message came for {_SILENCE_S:g} s; the worker serves on with the old weights"
        ) from None


_MAX_VERSION = 128
_BACKENDS = ("nccl", "gloo")
_SMALLEST_GROUP = 2


Source = DiskWeights | TensorsInCall | BroadcastWeights | IpcWeights
"""The directory of `DiskWeights` is the caller's word, not checked yet."""


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


@dataclass(slots=True, eq=False)
class WeightOperations(OperationKind):
    """Replaces the engine's weights; their version is in the info of ``host``."""

    host: WorkerHost[Any]
    memory: MemoryOperations
    _unknown: bool = False
    """An update failed in a way that leaves open which weights the engine has."""

    async def update(self, report: OperationReport, update: Update) -> Updated:
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
        control: WeightControl = self.controls.require("UpdateWeights", lambda c: c.weights)
        with self.operations.one("UpdateWeights", report) as operation:
            previous = self.host.loaded().weight_version
            self._check(update.version, previous)
            source = await self._prepared(update.source, report)
            await control.check_weights(source, report.count)
            out_since_s = time.monotonic()
            self.stop.take_out(Cause.WEIGHTS)
            try:
                report.enter(OperationStage.DRAINING)
                await self.stop.until_idle(update.timeout_s)
                await operation.apply(self._replace(control, source, update.version))
            finally:
                if not self._unknown:
                    self.stop.put_back(Cause.WEIGHTS)
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
        if MemoryTag.WEIGHTS in self.memory.released:
            raise OperationConflictError(
                "the weights' memory is released; call ResumeMemory with the tag WEIGHTS first"
            )

    async def _prepared(self, source: Source, report: OperationReport) -> WeightSource:
        plan = self.host.plan.control
        match source:
            case TensorsInCall():
                return await Received(plan.max_weights_bytes, report.count).all_of(source)
            case DiskWeights(path):
                return DiskWeights(await plan.directories.resolve("start.disk.path", str(path)))
            case BroadcastWeights():
                _check_broadcast(source)
            case IpcWeights():
                if not source.zmq_addresses:
                    raise InvalidRequestError.of("start.ipc.zmq_addresses", "must have an address")
        return source

    async def _replace(self, control: WeightControl, source: WeightSource, version: str) -> None:
        plan = self.host.plan.control
        record = WeightsRecord(plan.weights_record, plan.model_path)
        files = await record.about_to_load(source.path) if isinstance(source, DiskWeights) else {}
        before, self._unknown = self._unknown, True
        try:
            await control.update_weights(source, version)
        except REFUSALS:
            self._unknown = before  # refused: the old ones are in place
            raise
        self._unknown = False
        self.host.change_info(weight_version=version)
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
