"""What each command sends, and what describes the response."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from millstream.v1 import admin_pb2, engine_control_pb2, tensor_pb2
from millstream_client.transport import Metadata
from millstream_client.writing import half_close, write
from millstream_server.cli.admin import results
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
Describe = Callable[[Any], Sequence[str]]
"""Returns the lines of a response, the most important one first."""
_Args = argparse.Namespace


class IncompleteError(Exception):
    """A call ended with OK, but without its result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminCall:
    """A call of one server."""

    method: str
    request: Message | Callable[[], AsyncGenerator[Message, None]]
    """A function: it makes a stream of requests, for each server."""
    describe: Describe
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


def make_calls(args: _Args, servers: int) -> Sequence[AdminCall]:
    """Return the call for each of so many servers.

    Raises:
        ValueError: flags don't fit together, or a file can't be used.
    """
    name = args.admin_command.name
    if name == "update-weights":
        return _update_weights(args, servers)
    return [_CALLS[name](args)] * servers


def _call(
    method: str,
    describe: Describe,
    fields: Callable[[_Args], Mapping[str, Any]] = lambda _: {},
    timeout_s: float | None = None,
) -> Callable[[_Args], AdminCall]:
    """Return what makes a command's call; ``fields`` are those of its request."""
    kind = getattr(engine_control_pb2, f"{method}Request", None) or getattr(
        admin_pb2, f"{method}Request"
    )
    return lambda args: AdminCall(
        method=method, request=kind(**fields(args)), describe=describe, timeout_s=timeout_s
    )


def _flush_cache(args: _Args) -> AdminCall:
    if args.timeout_s is not None and not args.drain:
        raise ValueError("--timeout-s is for --drain; without it flush-cache doesn't wait")
    request = engine_control_pb2.FlushCacheRequest(drain=args.drain, timeout=_timeout(args))
    return AdminCall(method="FlushCache", request=request, describe=results.flushed)


def _start_profile(args: _Args) -> AdminCall:
    kind = engine_control_pb2.ProfileActivity
    activities = [_enum(kind, "PROFILE_ACTIVITY", name) for name in args.activity]
    return AdminCall(
        method="StartProfile",
        request=engine_control_pb2.StartProfileRequest(activities=activities, steps=args.steps),
        describe=partial(results.profiling, steps=args.steps),
    )


def _unload_lora(args: _Args) -> AdminCall:
    return AdminCall(
        method="UnloadLora",
        request=engine_control_pb2.UnloadLoraRequest(name=args.name),
        describe=lambda _: [f"adapter {args.name} removed"],
    )


def _set_log_level(args: _Args) -> AdminCall:
    level = _enum(admin_pb2.LogLevel, "LOG_LEVEL", args.level)
    return AdminCall(
        method="SetLogLevel",
        request=admin_pb2.SetLogLevelRequest(logger=args.logger, level=level),
        describe=partial(results.log_level, logger=args.logger, level=args.level),
        timeout_s=_SHORT_S,
    )


def _timeout(args: _Args) -> Duration | None:
    if args.timeout_s is None:
        return None
    timeout = Duration()
    timeout.FromNanoseconds(round(args.timeout_s * 1_000_000_000))
    return timeout


def _tags(args: _Args) -> list[engine_control_pb2.MemoryTag.ValueType]:
    return [_enum(engine_control_pb2.MemoryTag, "MEMORY_TAG", tag) for tag in args.tags]


def _enum(kind: Any, prefix: str, name: str) -> Any:
    """Return the number of a value that a flag names."""
    return kind.Value(f"{prefix}_{name.upper().replace('-', '_')}")


_CALLS: Mapping[str, Callable[[_Args], AdminCall]] = {
    "status": _call("GetEngineState", results.engine_state, timeout_s=_SHORT_S),
    "drain": _call("Drain", results.drained, lambda args: {"timeout": _timeout(args)}),
    "undrain": _call("Undrain", results.undrained, timeout_s=_SHORT_S),
    "pause": _call(
        "Pause",
        results.paused,
        lambda args: {"mode": _enum(engine_control_pb2.PauseMode, "PAUSE_MODE", args.mode)},
    ),
    "continue": _call("Continue", results.continued),
    "release-memory": _call(
        "ReleaseMemory",
        results.released,
        lambda args: {"tags": _tags(args), "timeout": _timeout(args)},
    ),
    "resume-memory": _call("ResumeMemory", results.resumed, lambda args: {"tags": _tags(args)}),
    "flush-cache": _flush_cache,
    "start-profile": _start_profile,
    "stop-profile": _call("StopProfile", results.profiled),
    "load-lora": _call(
        "LoadLora", results.loaded, lambda args: {"name": args.name, "path": args.path}
    ),
    "unload-lora": _unload_lora,
    "list-loras": _call("ListLoras", results.adapters, timeout_s=_SHORT_S),
    "server-status": _call("GetServerStatus", results.server_status, timeout_s=_SHORT_S),
    "set-log-level": _set_log_level,
}


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

    return AdminCall(method="UpdateWeights", request=messages, describe=results.updated)


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
    found = []
    for offset in args.rank_offset:
        one = engine_control_pb2.UpdateWeightsStart()
        one.CopyFrom(start)
        one.broadcast.CopyFrom(
            engine_control_pb2.WeightsBroadcast(
                master_address=args.broadcast,
                rank_offset=offset,
                world_size=args.world_size,
                group_name=args.group_name,
                backend=args.backend,
                tensors=described,
            )
        )
        found.append(one)
    return found


def _pair(text: str) -> tuple[str, str]:
    uuid, sign, address = text.partition("=")
    if not (uuid and sign and address):
        raise ValueError(f"--ipc: {text!r} is not UUID=ADDRESS")
    return uuid, address
