"""What each command sends."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from millstream.v1 import admin_pb2, engine_control_pb2, tensor_pb2
from millstream_client.transport import Metadata
from millstream_client.writing import half_close, write
from millstream_server.media.tensor import ElementType, TensorSpec
from millstream_server.model_files.weights import BadSafetensorsError, StoredTensor, read_header

CHUNK_BYTES = 1 << 20
"""The contract allows 2 MiB; more than one chunk is under way at a time."""
_TYPES = {
    "F32": (ElementType.FLOAT32, tensor_pb2.ELEMENT_TYPE_FLOAT32),
    "BF16": (ElementType.BFLOAT16, tensor_pb2.ELEMENT_TYPE_BFLOAT16),
    "F16": (ElementType.FLOAT16, tensor_pb2.ELEMENT_TYPE_FLOAT16),
}
_SHORT_S = 10.0
"""Time-out of a call that needs no engine."""

Report = Callable[[engine_control_pb2.OperationProgress], None]
_Args = argparse.Namespace


class IncompleteError(Exception):
    """A call ended with OK, but without its result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminCall:
    """A call of one server."""

    method: str
    request: Message | Callable[[], AsyncGenerator[Message, None]]
    """A function: it makes a stream of requests, for each server."""
    timeout_s: float | None = None
    """None: it lasts as long as the engine needs."""

    async def run(self, stub: Any, report: Report, metadata: Metadata) -> Message:
        """Call the method of ``stub``; return the response that has the result.

        Raises:
            grpc.aio.AioRpcError: it failed.
            IncompleteError: see there.
            ValueError: a file to send can't be read; nothing was changed.
        """
        method = getattr(stub, self.method)
        if callable(self.request):
            return await _upload(method(metadata=metadata), self.request, report)
        call = method(self.request, timeout=self.timeout_s, metadata=metadata)
        if hasattr(call, "__aiter__"):
            return await _last(call, report)
        response: Message = await call
        return response


async def _upload(
    call: Any, requests: Callable[[], AsyncGenerator[Message, None]], report: Report
) -> Message:
    reading = asyncio.ensure_future(_last(call, report))
    try:
        async with contextlib.aclosing(requests()) as messages:
            async for message in messages:
                if not await write(call, message):
                    break
            else:
                await half_close(call)
        return await reading
    finally:
        call.cancel()
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)


async def _last(call: Any, report: Report) -> Message:
    """Report each response's progress; return the one that ends the operation."""
    async for response in call:
        report(response.progress)
        if response.progress.stage == engine_control_pb2.OPERATION_STAGE_DONE:
            done: Message = response
            async for _ in call:  # to its status
                pass
            return done
    raise IncompleteError("the call ended without a result; `status` says what was done")


_SHORT = ("status", "undrain", "list-loras", "server-status", "set-log-level")
"""Commands that need no engine."""


def make_calls(args: _Args, servers: int) -> Sequence[AdminCall]:
    """Return the call for each of so many servers.

    Raises:
        ValueError: flags don't fit together, or a file can't be used.
    """
    name, method = args.admin_command.name, args.admin_command.method
    if name == "update-weights":
        return _update_weights(args, servers)
    if name == "flush-cache" and args.timeout_s is not None and not args.drain:
        raise ValueError("--timeout-s is for --drain; without it flush-cache doesn't wait")
    request = _request(method, args)
    timeout_s = _SHORT_S if name in _SHORT else None
    return [AdminCall(method=method, request=request, timeout_s=timeout_s)] * servers


def _request(method: str, args: _Args) -> Message:
    """Make a request of the flags: those that have the names of its fields."""
    name = f"{method}Request"
    kind: Any = getattr(engine_control_pb2, name, None) or getattr(admin_pb2, name)
    given = {**vars(args), "timeout": _timeout(args)}
    fields = {field.name: _value(field, given[field.name]) for field in kind.DESCRIPTOR.fields}
    request: Message = kind(**fields)
    return request


def _value(field: FieldDescriptor, given: Any) -> Any:
    """Return a field's value; a value of an enum is named without its enum, such as kv-cache."""
    if field.enum_type is None:
        return given
    if isinstance(given, list):
        return [_value(field, each) for each in given]
    prefix = field.enum_type.values[0].name.removesuffix("UNSPECIFIED")
    return field.enum_type.values_by_name[prefix + given.upper().replace("-", "_")].number


def _timeout(args: _Args) -> Duration | None:
    if getattr(args, "timeout_s", None) is None:
        return None
    timeout = Duration()
    timeout.FromNanoseconds(round(args.timeout_s * 1_000_000_000))
    return timeout


# ---- weights -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _FileTensor:
    """A tensor in a file, and its description for the engine."""

    path: Path
    stored: StoredTensor
    message: engine_control_pb2.WeightTensor


def _read_tensors(paths: Sequence[Path]) -> list[_FileTensor]:
    """Read the headers of safetensors files.

    Raises:
        ValueError: a file isn't one, a tensor can't be sent, or two have the same name.
    """
    found: dict[str, _FileTensor] = {}
    for path in paths:
        try:
            stored = read_header(path)
        except BadSafetensorsError as error:
            raise ValueError(str(error)) from error
        for tensor in stored:
            if (other := found.get(tensor.name)) is not None:
                raise ValueError(f"{tensor.name} is in {other.path} and again in {path}")
            found[tensor.name] = _FileTensor(path, tensor, _described(path, tensor))
    if not found:
        raise ValueError(f"no tensor in {', '.join(map(str, paths))}")
    return list(found.values())


def _described(path: Path, tensor: StoredTensor) -> engine_control_pb2.WeightTensor:
    if tensor.dtype not in _TYPES:
        raise ValueError(
            f"{path}: {tensor.name} is {tensor.dtype}; {', '.join(_TYPES)} can be sent. Give such "
            "a checkpoint by --path, for the engine to read it"
        )
    kind, element_type = _TYPES[tensor.dtype]
    if problem := TensorSpec(kind, tensor.shape).problem():
        raise ValueError(f"{path}: {tensor.name} {problem}")
    spec = tensor_pb2.TensorSpec(element_type=element_type, shape=tensor.shape)
    return engine_control_pb2.WeightTensor(name=tensor.name, spec=spec)


async def _tensor_messages(
    tensors: Sequence[_FileTensor],
) -> AsyncGenerator[engine_control_pb2.UpdateWeightsRequest, None]:
    """Yield each tensor and its bytes; one chunk is in memory at a time.

    Raises:
        ValueError: a file has become shorter, or can't be read any more.
    """
    for tensor in tensors:
        yield engine_control_pb2.UpdateWeightsRequest(tensor=tensor.message)
        for number in range(math.ceil(tensor.stored.nbytes / CHUNK_BYTES)):
            offset = number * CHUNK_BYTES
            data = await asyncio.to_thread(_read, tensor, offset)
            chunk = tensor_pb2.TensorChunk(offset=offset, data=data)
            yield engine_control_pb2.UpdateWeightsRequest(chunk=chunk)


def _read(tensor: _FileTensor, offset: int) -> bytes:
    wanted = min(CHUNK_BYTES, tensor.stored.nbytes - offset)
    try:
        with tensor.path.open("rb") as file:
            file.seek(tensor.stored.offset + offset)
            data = file.read(wanted)
    except OSError as error:
        raise ValueError(f"{tensor.path} can't be read: {error.strerror}") from error
    if len(data) < wanted:
        raise ValueError(f"{tensor.path} has become shorter while it was sent")
    return data


def _update_weights(args: _Args, servers: int) -> Sequence[AdminCall]:
    if not args.broadcast and (args.tensors or args.rank_offset or args.world_size):
        raise ValueError("--tensors, --rank-offset and --world-size are for --broadcast")
    tensors: list[_FileTensor] = []
    start = engine_control_pb2.UpdateWeightsStart(
        weight_version=args.weight_version, timeout=_timeout(args)
    )
    if args.path:
        start.disk.path = args.path
    elif args.safetensors:
        tensors = _read_tensors(args.safetensors)
        start.tensors.total_bytes = sum(tensor.stored.nbytes for tensor in tensors)
    elif args.ipc:
        start.ipc.zmq_addresses.update(_pair(text) for text in args.ipc)
    else:
        return [_update(one) for one in _broadcasts(args, start, servers)]
    return [_update(start, tensors)] * servers


def _update(
    start: engine_control_pb2.UpdateWeightsStart, tensors: Sequence[_FileTensor] = ()
) -> AdminCall:
    async def messages() -> AsyncGenerator[Message, None]:
        yield engine_control_pb2.UpdateWeightsRequest(start=start)
        async for message in _tensor_messages(tensors):
            yield message

    return AdminCall(method="UpdateWeights", request=messages)


def _broadcasts(
    args: _Args, start: engine_control_pb2.UpdateWeightsStart, servers: int
) -> list[engine_control_pb2.UpdateWeightsStart]:
    """Return the first message for each server; its processes have their own ranks."""
    if not args.tensors or args.world_size is None:
        raise ValueError("--broadcast needs --tensors, --rank-offset and --world-size, too")
    if len(args.rank_offset) != servers:
        raise ValueError(
            f"--rank-offset names {len(args.rank_offset)} ranks for {servers} workers: give one "
            "for each, in their order, with commas"
        )
    described = [tensor.message for tensor in _read_tensors(args.tensors)]
    shared = engine_control_pb2.WeightsBroadcast(
        master_address=args.broadcast,
        world_size=args.world_size,
        group_name=args.group_name,
        backend=args.backend,
        tensors=described,
    )
    found = []
    for offset in args.rank_offset:
        one = engine_control_pb2.UpdateWeightsStart(broadcast=shared)
        one.broadcast.rank_offset = offset
        one.MergeFrom(start)
        found.append(one)
    return found


def _pair(text: str) -> tuple[str, str]:
    uuid, sign, address = text.partition("=")
    if not (uuid and sign and address):
        raise ValueError(f"--ipc: {text!r} is not UUID=ADDRESS")
    return uuid, address
