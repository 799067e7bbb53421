"""Responses as lines for people, the most important one first."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from millstream.v1 import admin_pb2, engine_control_pb2

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_STEP = 1024


def _engine_state(response: Any) -> Sequence[str]:
    state = response.state
    causes = [
        *(["drained"] if state.drained else []),
        *(["paused"] if state.paused else []),
        *([f"memory released ({_tags(state.released)})"] if state.released else []),
        *([f"{state.operation} runs"] if state.operation else []),
    ]
    return [
        ", ".join(causes) or "nothing is set: in service, unless `server-status` says otherwise",
        f"weights: {state.weight_version or 'version not named'}",
        f"requests: {state.open_requests} open",
        f"adapters: {', '.join(lora.name for lora in state.adapters) or 'none'}",
        f"profile: {'until `stop-profile`' if state.profiling else 'none'}",
        f"can do: {', '.join(state.supported)}",
    ]


def _released(response: Any) -> Sequence[str]:
    result = response.result
    before = set(result.already_released)
    now = [tag for tag in result.released if tag not in before]
    lines = [f"released: {_tags(now) or 'nothing new'}"]
    if before:
        lines.append(f"released before: {_tags(sorted(before))}")
    for what, name in (("host", "host_bytes"), ("device", "device_bytes")):
        old, new = getattr(result.before, name), getattr(result.after, name)
        if old or new:
            lines.append(f"{what} memory: {size(old)} before, {size(new)} now")
    return [*lines, "out of service until `millstream admin resume-memory`"]


def _resumed(response: Any) -> Sequence[str]:
    lines = [f"resumed: {_tags(response.resumed) or 'nothing, for nothing was released'}"]
    if response.released:
        lines.append(f"still released: {_tags(response.released)}; out of service until then")
    if response.after.host_bytes:
        device = response.after.device_bytes
        lines.append(
            f"memory now: {size(response.after.host_bytes)} on the host"
            + (f", {size(device)} on devices" if device else "")
        )
    return lines


def _server_status(response: Any) -> Sequence[str]:
    status = response.status
    health = [f"{name or 'server'} {_serving(up)}" for name, up in sorted(status.health.items())]
    open_work = [f"{name} {count}" for name, count in sorted(status.open_work.items()) if count]
    uptime = _seconds(status.uptime)
    return [
        f"{_serving(status.health.get('', False))}, pid {status.pid}, up {uptime}",
        f"version: {status.millstream_version}",
        f"health: {', '.join(health)}",
        f"conditions: {', '.join(status.health_conditions) or 'none'}",
        f"open work: {', '.join(open_work) or 'none'}",
        f"services: {', '.join(status.services)}",
        "settings:",
        *(f"  {name} = {value}" for name, value in sorted(status.settings.items())),
    ]


def size(count: int) -> str:
    """Return a number of bytes in a unit that fits."""
    amount, unit = float(count), 0
    while amount >= _STEP and unit < len(_UNITS) - 1:
        amount, unit = amount / _STEP, unit + 1
    return f"{amount:.1f} {_UNITS[unit]}" if unit else f"{count} B"


def _tags(tags: Iterable[int]) -> str:
    return ", ".join(_word(engine_control_pb2.MemoryTag, tag) for tag in tags)


def _word(kind: Any, value: int) -> str:
    """Return a value of an enum as flags name it."""
    prefix = str(kind.Name(0)).removesuffix("UNSPECIFIED")
    return str(kind.Name(value)).removeprefix(prefix).lower().replace("_", "-")


def _adapter(adapter: engine_control_pb2.LoadedLora) -> str:
    rank = f", rank {adapter.rank}" if adapter.rank else ""
    return f"{adapter.name} ({adapter.path}{rank})"


def _serving(up: bool) -> str:  # noqa: FBT001 - a word for each value
    return "SERVING" if up else "NOT_SERVING"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _seconds(duration: Duration) -> str:
    return f"{duration.ToMicroseconds() / 1_000_000:.2f} s"


def _paused(response: Any) -> Sequence[str]:
    first = "was paused already" if response.was_paused else "paused"
    return [f"{first}; {_count(response.open_requests, 'request')} open until `continue`"]


def _updated(result: Any) -> Sequence[str]:
    previous = result.previous_version or "a version without a name"
    out = _seconds(result.out_of_service)
    return [f"weights: {result.weight_version}, before {previous}; out of service for {out}"]


def _profiling(response: Any, steps: int) -> Sequence[str]:
    end = f"for {_count(steps, 'step')}" if steps else "until `stop-profile`"
    return [f"recording {end}, into {response.directory} on the worker"]


def _log_level(response: Any, args: argparse.Namespace) -> Sequence[str]:
    before = _word(admin_pb2.LogLevel, response.previous_level)
    return [f"level of {args.logger or 'the root logger'}: {args.level}, before {before}"]


_LINES: Mapping[str, Callable[[Any, argparse.Namespace], Sequence[str]]] = {
    "status": lambda response, _: _engine_state(response),
    "drain": lambda response, _: [
        f"drained after {_seconds(response.progress.elapsed)}: no request is open",
        "out of service until `millstream admin undrain`",
    ],
    "undrain": lambda response, _: [
        "back in service" if response.was_drained else "wasn't drained; nothing was changed"
    ],
    "pause": lambda response, _: _paused(response),
    "continue": lambda response, _: [
        "goes on" if response.was_paused else "wasn't paused; nothing was changed"
    ],
    "release-memory": lambda response, _: _released(response),
    "resume-memory": lambda response, _: _resumed(response),
    "update-weights": lambda response, _: _updated(response.result),
    "flush-cache": lambda *_: ["the prefix cache is empty"],
    "start-profile": lambda response, args: _profiling(response, args.steps),
    "stop-profile": lambda response, _: [
        f"recorded {_count(len(response.files), 'file')} on the worker",
        *(f"{file.path} ({size(file.bytes)})" for file in response.files),
    ],
    "load-lora": lambda response, _: [f"adapter {_adapter(response.adapter)} loaded"],
    "unload-lora": lambda _, args: [f"adapter {args.name} removed"],
    "list-loras": lambda response, _: [
        _count(len(response.adapters), "adapter") if response.adapters else "no adapter is loaded",
        *map(_adapter, response.adapters),
    ],
    "server-status": lambda response, _: _server_status(response),
    "set-log-level": _log_level,
}
"""By command; some depend on its flags."""


def describe(args: argparse.Namespace, response: Message) -> Sequence[str]:
    """Return the lines of a command's response."""
    return _LINES[args.admin_command.name](response, args)
