"""Conversion of what `worker.control` does to messages, and of requests to what it takes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from google.protobuf.duration_pb2 import Duration

from millstream.v1 import engine_control_pb2 as pb
from millstream_server.control.operations import NamedTensor
from millstream_server.protobuf import engine_control as convert
from millstream_server.protobuf.common import duration, seconds
from millstream_server.runtime.errors import InvalidRequestError
from millstream_server.worker.control.core import EngineState
from millstream_server.worker.control.operations import OperationProgress
from millstream_server.worker.control.out_of_service import Released, Resumed
from millstream_server.worker.control.weights import (
    DirectoryNamed,
    Piece,
    Source,
    TensorsInCall,
    Update,
    Updated,
)

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


def state_to_proto(state: EngineState) -> pb.EngineState:
    """Convert what operations have set."""
    return pb.EngineState(
        drained=state.drained,
        paused=state.paused,
        released=convert.tags_to_proto(state.released),
        weight_version=state.weight_version,
        adapters=map(convert.adapter_to_proto, state.adapters),
        profiling=state.profiling,
        open_requests=state.open_requests,
        operation=state.operation,
        supported=state.supported,
    )


def progress_to_proto(progress: OperationProgress) -> pb.OperationProgress:
    """Convert how far an operation is."""
    return pb.OperationProgress(
        stage=pb.OperationStage.Value(f"OPERATION_STAGE_{progress.stage.name}"),
        open_requests=progress.open_requests,
        bytes_done=progress.bytes_done,
        bytes_total=progress.bytes_total,
        elapsed=duration(progress.elapsed_s),
    )


def released_to_proto(released: Released) -> pb.MemoryReleased:
    """Convert what a release did."""
    return pb.MemoryReleased(
        released=convert.tags_to_proto(released.released),
        already_released=convert.tags_to_proto(released.already),
        before=convert.use_to_proto(released.before),
        after=convert.use_to_proto(released.after),
    )


def resumed_to_proto(resumed: Resumed) -> pb.ResumeMemoryResponse:
    """Convert what a resume did."""
    return pb.ResumeMemoryResponse(
        resumed=convert.tags_to_proto(resumed.resumed),
        released=convert.tags_to_proto(resumed.released),
        after=convert.use_to_proto(resumed.after),
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
    """Convert the first message of an update; its tensors are read as they are needed.

    Raises:
        InvalidRequestError: the first message isn't `start`, or has no source.
    """
    if first is None or first.WhichOneof("message") != "start":
        raise InvalidRequestError.of("start", "must be the first message")
    start = first.start
    return Update(
        version=start.weight_version,
        source=_source(start, others),
        timeout_s=convert.timeout_from_proto(start, "start.timeout"),
    )


def _source(start: pb.UpdateWeightsStart, requests: AsyncIterator[Any]) -> Source:
    match start.WhichOneof("source"):
        case "disk":
            return DirectoryNamed(start.disk.path)
        case "tensors":
            return TensorsInCall(_parts(requests), start.tensors.total_bytes)
        case "broadcast":
            return convert.broadcast_from_proto(start.broadcast)
        case "ipc":
            return convert.ipc_from_proto(start.ipc)
    raise InvalidRequestError.of("start.source", "set one of disk, tensors, broadcast, ipc")


async def _parts(
    requests: AsyncIterator[pb.UpdateWeightsRequest],
) -> AsyncIterator[NamedTensor | Piece]:
    async for message in requests:
        match message.WhichOneof("message"):
            case "tensor":
                yield convert.tensor_from_proto(message.tensor, "tensor")
            case "chunk":
                yield Piece(message.chunk.offset, message.chunk.data)
            case _:
                raise InvalidRequestError.of("message", "set one of tensor, chunk after `start`")
