"""Conversion of what `worker.control` does to messages, and of requests to what it takes.

What a message has that can't be read raises `InvalidRequestError`, with its field.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from google.protobuf.duration_pb2 import Duration

from millstream.v1 import engine_control_pb2 as pb
from millstream_server.control.operations import (
    BroadcastWeights,
    DiskWeights,
    IpcWeights,
    LoraAdapter,
    MemoryTag,
    MemoryUse,
    NamedTensor,
    PauseMode,
    ProfileActivity,
)
from millstream_server.protobuf.common import duration, known, same_fields, seconds, values
from millstream_server.protobuf.media import spec_from_proto
from millstream_server.runtime.errors import InvalidRequestError
from millstream_server.worker.control.core import ControlCore
from millstream_server.worker.control.operations import Cause, OperationReport
from millstream_server.worker.control.out_of_service import Released, Resumed
from millstream_server.worker.control.weights import Piece, Source, TensorsInCall, Update, Updated

_TAGS_TO_PROTO = {tag: pb.MemoryTag.Value(f"MEMORY_TAG_{tag.name}") for tag in MemoryTag}
_TAGS: dict[Any, MemoryTag] = {value: tag for tag, value in _TAGS_TO_PROTO.items()}
_ACTIVITIES: dict[Any, ProfileActivity] = {
    pb.ProfileActivity.Value(f"PROFILE_ACTIVITY_{activity.name}"): activity
    for activity in ProfileActivity
}
_MODES: dict[Any, PauseMode] = {
    pb.PAUSE_MODE_UNSPECIFIED: PauseMode.IN_PLACE,
    **{pb.PauseMode.Value(f"PAUSE_MODE_{mode.name}"): mode for mode in PauseMode},
}
_USE = same_fields(pb.MemoryUse, MemoryUse)
_BROADCAST = same_fields(pb.WeightsBroadcast, BroadcastWeights)
_MOST_VALUES = 64
"""Most values of an enum in one list, each of which may come several times."""
T = TypeVar("T")
_SHOWN = 256
"""Most characters of a text in the log."""
_MOST_SHOWN = 16
"""Most values of a list in the log."""


def shown(request: Any) -> dict[str, Any]:
    """Return what the log shows of a request: short fields, none of them a secret."""
    if isinstance(request, pb.UpdateWeightsRequest):
        start = request.start
        source = start.WhichOneof("source") or ""
        path = {"path": start.disk.path[:_SHOWN]} if source == "disk" else {}
        return {"weight_version": start.weight_version[:_SHOWN], "source": source, **path}
    if request is None:
        return {}
    return {f.name: _shown(f, value) for f, value in request.ListFields()}


def _shown(field: Any, value: Any) -> Any:
    if isinstance(value, Duration):
        return seconds(value)
    if field.enum_type is None:
        return value[:_SHOWN] if isinstance(value, str) else value
    names = field.enum_type.values_by_number
    values = [value] if isinstance(value, int) else value[:_MOST_SHOWN]
    return ",".join(names[v].name if v in names else str(v) for v in values)


def state_to_proto(control: ControlCore) -> pb.EngineState:
    """Return what operations have set.

    Raises:
        UnavailableError: the model is being loaded.
    """
    info = control.host.loaded()
    return pb.EngineState(
        drained=control.stop.holds(Cause.DRAINED),
        paused=control.pause.paused,
        released=tags_to_proto(control.memory.released),
        weight_version=info.weight_version,
        adapters=map(adapter_to_proto, info.adapters),
        profiling=control.profile.recording,
        open_requests=control.stop.open_requests,
        operation=control.operations.current,
        supported=control.controls.names(),
    )


def progress_to_proto(report: OperationReport) -> pb.OperationProgress:
    """Convert how far an operation is."""
    done, total = report.bytes
    return pb.OperationProgress(
        stage=pb.OperationStage.Value(f"OPERATION_STAGE_{report.stage.name}"),
        open_requests=report.open_requests(),
        bytes_done=done,
        bytes_total=total,
        elapsed=duration(time.monotonic() - report.began_s),
    )


def released_to_proto(released: Released) -> pb.MemoryReleased:
    """Convert what a release did."""
    return pb.MemoryReleased(
        released=tags_to_proto(released.released),
        already_released=tags_to_proto(released.already),
        before=_use_to_proto(released.before),
        after=_use_to_proto(released.after),
    )


def resumed_to_proto(resumed: Resumed) -> pb.ResumeMemoryResponse:
    """Convert what a resume did."""
    return pb.ResumeMemoryResponse(
        resumed=tags_to_proto(resumed.resumed),
        released=tags_to_proto(resumed.released),
        after=_use_to_proto(resumed.after),
    )


def updated_to_proto(updated: Updated) -> pb.WeightsUpdated:
    """Convert what an update did."""
    return pb.WeightsUpdated(
        previous_version=updated.previous_version,
        weight_version=updated.version,
        out_of_service=duration(updated.out_of_service_s),
    )


def update_from_proto(
    first: pb.UpdateWeightsRequest | None, others: AsyncIterator[pb.UpdateWeightsRequest]
) -> Update:
    """Convert the first message of an update; its tensors are read as they are needed."""
    if first is None or first.WhichOneof("message") != "start":
        raise InvalidRequestError.of("start", "must be the first message")
    start = first.start
    return Update(
        version=start.weight_version,
        source=_source(start, others),
        timeout_s=timeout_from_proto(start, "start.timeout"),
    )


def _source(start: pb.UpdateWeightsStart, requests: AsyncIterator[Any]) -> Source:
    match start.WhichOneof("source"):
        case "disk":
            return DiskWeights(Path(start.disk.path))
        case "tensors":
            return TensorsInCall(_parts(requests), start.tensors.total_bytes)
        case "broadcast":
            return _broadcast_from_proto(start.broadcast)
        case "ipc":
            return IpcWeights(dict(start.ipc.zmq_addresses))
    raise InvalidRequestError.of("start.source", "set one of disk, tensors, broadcast, ipc")


async def _parts(
    requests: AsyncIterator[pb.UpdateWeightsRequest],
) -> AsyncIterator[NamedTensor | Piece]:
    async for message in requests:
        match message.WhichOneof("message"):
            case "tensor":
                yield _tensor_from_proto(message.tensor, "tensor")
            case "chunk":
                yield Piece(message.chunk.offset, message.chunk.data)
            case _:
                raise InvalidRequestError.of("message", "set one of tensor, chunk after `start`")


def _tensor_from_proto(message: pb.WeightTensor, field: str) -> NamedTensor:
    return NamedTensor(message.name, spec_from_proto(message.spec, f"{field}.spec"))


def _broadcast_from_proto(message: pb.WeightsBroadcast) -> BroadcastWeights:
    return BroadcastWeights(
        **values(message, _BROADCAST),
        tensors=[
            _tensor_from_proto(tensor, f"start.broadcast.tensors[{n}]")
            for n, tensor in enumerate(message.tensors)
        ],
    )


# ---- parts of several messages -------------------------------------------------------------------


def tags_from_proto(tags: Sequence[Any]) -> frozenset[MemoryTag]:
    """Convert memory tags."""
    return _known_set("tags", _TAGS, tags)


def tags_to_proto(tags: Iterable[MemoryTag]) -> list[Any]:
    """Convert memory tags, in the contract's order."""
    return sorted(_TAGS_TO_PROTO[tag] for tag in tags)


def _use_to_proto(use: MemoryUse) -> pb.MemoryUse:
    return pb.MemoryUse(**values(use, _USE))


def mode_from_proto(mode: Any) -> PauseMode:
    """Convert a pause's mode."""
    return known("mode", _MODES, mode)


def activities_from_proto(activities: Sequence[Any]) -> frozenset[ProfileActivity]:
    """Convert what a profile is to record."""
    return _known_set("activities", _ACTIVITIES, activities)


def timeout_from_proto(message: Any, field: str = "timeout") -> float | None:
    """Convert the longest time to wait, in seconds; None: it isn't set."""
    if not message.HasField("timeout"):
        return None
    found = seconds(message.timeout)
    if found < 0:
        raise InvalidRequestError.of(field, "must not be negative")
    return found


def adapter_to_proto(adapter: LoraAdapter) -> pb.LoadedLora:
    """Convert a loaded adapter."""
    path = str(adapter.path) if adapter.path else ""
    return pb.LoadedLora(name=adapter.name, path=path, rank=adapter.rank)


def _known_set(field: str, values: dict[Any, T], given: Sequence[Any]) -> frozenset[T]:
    if len(given) > _MOST_VALUES:
        raise InvalidRequestError.of(field, f"has {len(given)} values; {_MOST_VALUES} are allowed")
    return frozenset(known(f"{field}[{n}]", values, value) for n, value in enumerate(given))
