"""What each command sends, and what it prints of the response."""

from __future__ import annotations

import argparse
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from functools import partial
from typing import Any

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from millstream.v1 import admin_pb2, engine_control_pb2
from millstream_server.cli.admin import results
from millstream_server.cli.admin.calls import AdminCall, OneResponse, Upload, WithProgress
from millstream_server.cli.admin.tensors import (
    FileTensor,
    read_tensors,
    tensor_messages,
    total_bytes,
)

_Args = argparse.Namespace


def make_calls(args: _Args, servers: int) -> Sequence[AdminCall]:
    """Return the call for each of so many servers.

    Raises:
        ValueError: flags don't fit together, or a file can't be used.
    """
    name = args.admin_command.name
    if name == "update-weights":
        return _update_weights(args, servers)
    return [_CALLS[name](args)] * servers


def _status(_: _Args) -> AdminCall:
    return OneResponse(
        method="GetEngineState",
        request=engine_control_pb2.GetEngineStateRequest(),
        describe=results.engine_state,
    )


def _drain(args: _Args) -> AdminCall:
    return WithProgress(
        method="Drain",
        request=engine_control_pb2.DrainRequest(timeout=_timeout(args)),
        describe=results.drained,
    )


def _undrain(_: _Args) -> AdminCall:
    return OneResponse(
        method="Undrain",
        request=engine_control_pb2.UndrainRequest(),
        describe=results.undrained,
    )


def _pause(args: _Args) -> AdminCall:
    mode = _enum(engine_control_pb2.PauseMode, "PAUSE_MODE", args.mode)
    return OneResponse(
        method="Pause",
        request=engine_control_pb2.PauseRequest(mode=mode),
        describe=results.paused,
        timeout_s=None,
    )


def _continue(_: _Args) -> AdminCall:
    return OneResponse(
        method="Continue",
        request=engine_control_pb2.ContinueRequest(),
        describe=results.continued,
        timeout_s=None,
    )


def _release_memory(args: _Args) -> AdminCall:
    request = engine_control_pb2.ReleaseMemoryRequest(tags=_tags(args), timeout=_timeout(args))
    return WithProgress(method="ReleaseMemory", request=request, describe=results.released)


def _resume_memory(args: _Args) -> AdminCall:
    return OneResponse(
        method="ResumeMemory",
        request=engine_control_pb2.ResumeMemoryRequest(tags=_tags(args)),
        describe=results.resumed,
        timeout_s=None,
    )


def _flush_cache(args: _Args) -> AdminCall:
    if args.timeout_s is not None and not args.drain:
        raise ValueError("--timeout-s is for --drain; without it flush-cache doesn't wait")
    request = engine_control_pb2.FlushCacheRequest(drain=args.drain, timeout=_timeout(args))
    return OneResponse(
        method="FlushCache", request=request, describe=results.flushed, timeout_s=None
    )


def _start_profile(args: _Args) -> AdminCall:
    activities = [
        _enum(engine_control_pb2.ProfileActivity, "PROFILE_ACTIVITY", name)
        for name in args.activity
    ]
    return OneResponse(
        method="StartProfile",
        request=engine_control_pb2.StartProfileRequest(activities=activities, steps=args.steps),
        describe=partial(results.profiling, steps=args.steps),
        timeout_s=None,
    )


def _stop_profile(_: _Args) -> AdminCall:
    return OneResponse(
        method="StopProfile",
        request=engine_control_pb2.StopProfileRequest(),
        describe=results.profiled,
        timeout_s=None,
    )


def _load_lora(args: _Args) -> AdminCall:
    return OneResponse(
        method="LoadLora",
        request=engine_control_pb2.LoadLoraRequest(name=args.name, path=args.path),
        describe=results.loaded,
        timeout_s=None,
    )


def _unload_lora(args: _Args) -> AdminCall:
    return OneResponse(
        method="UnloadLora",
        request=engine_control_pb2.UnloadLoraRequest(name=args.name),
        describe=lambda _: [f"adapter {args.name} removed"],
        timeout_s=None,
    )


def _list_loras(_: _Args) -> AdminCall:
    return OneResponse(
        method="ListLoras",
        request=engine_control_pb2.ListLorasRequest(),
        describe=results.adapters,
    )


def _server_status(_: _Args) -> AdminCall:
    return OneResponse(
        method="GetServerStatus",
        request=admin_pb2.GetServerStatusRequest(),
        describe=results.server_status,
    )


def _set_log_level(args: _Args) -> AdminCall:
    level = _enum(admin_pb2.LogLevel, "LOG_LEVEL", args.level)
    return OneResponse(
        method="SetLogLevel",
        request=admin_pb2.SetLogLevelRequest(logger=args.logger, level=level),
        describe=partial(results.log_level, logger=args.logger, level=args.level),
    )


_CALLS: Mapping[str, Callable[[_Args], AdminCall]] = {
    "status": _status,
    "drain": _drain,
    "undrain": _undrain,
    "pause": _pause,
    "continue": _continue,
    "release-memory": _release_memory,
    "resume-memory": _resume_memory,
    "flush-cache": _flush_cache,
    "start-profile": _start_profile,
    "stop-profile": _stop_profile,
    "load-lora": _load_lora,
    "unload-lora": _unload_lora,
    "list-loras": _list_loras,
    "server-status": _server_status,
    "set-log-level": _set_log_level,
}


# ---- weights -----------------------------------------------------------------------------------


def _update_weights(args: _Args, servers: int) -> Sequence[AdminCall]:
    if not args.broadcast and (args.tensors or args.rank_offset or args.world_size):
        raise ValueError("--tensors, --rank-offset and --world-size are for --broadcast")
    tensors: list[FileTensor] = []
    start = engine_control_pb2.UpdateWeightsStart(
        weight_version=args.weight_version, timeout=_timeout(args)
    )
    if args.path:
        start.disk.path = args.path
    elif args.safetensors:
        tensors = read_tensors(args.safetensors)
        start.tensors.total_bytes = total_bytes(tensors)
    elif args.ipc:
        start.ipc.zmq_addresses.update(_pair(text) for text in args.ipc)
    else:
        return [_update(one) for one in _broadcasts(args, start, servers)]
    return [_update(start, tensors)] * servers


def _update(
    start: engine_control_pb2.UpdateWeightsStart, tensors: Sequence[FileTensor] = ()
) -> AdminCall:
    async def messages() -> AsyncGenerator[Message, None]:
        yield engine_control_pb2.UpdateWeightsRequest(start=start)
        async for message in tensor_messages(tensors):
            yield message

    return Upload(method="UpdateWeights", messages=messages, describe=results.updated)


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
    described = [tensor.message for tensor in read_tensors(args.tensors)]
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
