"""Responses as lines for people."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from millstream.v1 import admin_pb2, engine_control_pb2

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_STEP = 1024


def engine_state(response: engine_control_pb2.GetEngineStateResponse) -> Sequence[str]:
    """Describe the state."""
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


def drained(response: engine_control_pb2.DrainResponse) -> Sequence[str]:
    """Describe a drain."""
    return [
        f"drained after {_seconds(response.progress.elapsed.ToMicroseconds())}: no request is open",
        "out of service until `millstream admin undrain`",
    ]


def undrained(response: engine_control_pb2.UndrainResponse) -> Sequence[str]:
    """Describe the end of a drain."""
    return ["back in service" if response.was_drained else "wasn't drained; nothing was changed"]


def paused(response: engine_control_pb2.PauseResponse) -> Sequence[str]:
    """Describe a pause."""
    first = "was paused already" if response.was_paused else "paused"
    return [f"{first}; {_count(response.open_requests, 'request')} open until `continue`"]


def continued(response: engine_control_pb2.ContinueResponse) -> Sequence[str]:
    """Describe the end of a pause."""
    return ["goes on" if response.was_paused else "wasn't paused; nothing was changed"]


def released(response: engine_control_pb2.ReleaseMemoryResponse) -> Sequence[str]:
    """Describe what was released, as measured."""
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


def resumed(response: engine_control_pb2.ResumeMemoryResponse) -> Sequence[str]:
    """Describe what was resumed."""
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


def updated(response: engine_control_pb2.UpdateWeightsResponse) -> Sequence[str]:
    """Describe an update of the weights."""
    result = response.result
    out = _seconds(result.out_of_service.ToMicroseconds())
    previous = result.previous_version or "a version without a name"
    return [f"weights: {result.weight_version}, before {previous}; out of service for {out}"]


def flushed(_: engine_control_pb2.FlushCacheResponse) -> Sequence[str]:
    """Describe an empty cache."""
    return ["the prefix cache is empty"]


def profiling(response: engine_control_pb2.StartProfileResponse, *, steps: int) -> Sequence[str]:
    """Describe a recording that began."""
    end = f"for {_count(steps, 'step')}" if steps else "until `stop-profile`"
    return [f"recording {end}, into {response.directory} on the worker"]


def profiled(response: engine_control_pb2.StopProfileResponse) -> Sequence[str]:
    """Describe the files of a recording."""
    files = [f"{file.path} ({size(file.bytes)})" for file in response.files]
    return [f"recorded {_count(len(files), 'file')} on the worker", *files]


def loaded(response: engine_control_pb2.LoadLoraResponse) -> Sequence[str]:
    """Describe a new adapter."""
    return [f"adapter {_adapter(response.adapter)} loaded"]


def adapters(response: engine_control_pb2.ListLorasResponse) -> Sequence[str]:
    """Describe all adapters."""
    found = [_adapter(adapter) for adapter in response.adapters]
    return [_count(len(found), "adapter") if found else "no adapter is loaded", *found]


def server_status(response: admin_pb2.GetServerStatusResponse) -> Sequence[str]:
    """Describe a process."""
    status = response.status
    health = [f"{name or 'server'} {_serving(up)}" for name, up in sorted(status.health.items())]
    open_work = [f"{name} {count}" for name, count in sorted(status.open_work.items()) if count]
    uptime = _seconds(status.uptime.ToMicroseconds())
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


def log_level(response: admin_pb2.SetLogLevelResponse, *, logger: str, level: str) -> Sequence[str]:
    """Describe a changed level."""
    before = admin_pb2.LogLevel.Name(response.previous_level).removeprefix("LOG_LEVEL_").lower()
    return [f"level of {logger or 'the root logger'}: {level}, before {before}"]


def size(count: int) -> str:
    """Return a number of bytes in a unit that fits."""
    amount, unit = float(count), 0
    while amount >= _STEP and unit < len(_UNITS) - 1:
        amount, unit = amount / _STEP, unit + 1
    return f"{amount:.1f} {_UNITS[unit]}" if unit else f"{count} B"


def _tags(tags: Iterable[int]) -> str:
    names = (engine_control_pb2.MemoryTag.Name(tag) for tag in tags)  # type: ignore[arg-type]
    return ", ".join(name.removeprefix("MEMORY_TAG_").lower().replace("_", "-") for name in names)


def _adapter(adapter: engine_control_pb2.LoadedLora) -> str:
    rank = f", rank {adapter.rank}" if adapter.rank else ""
    return f"{adapter.name} ({adapter.path}{rank})"


def _serving(up: bool) -> str:  # noqa: FBT001 - a word for each value
    return "SERVING" if up else "NOT_SERVING"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _seconds(microseconds: int) -> str:
    return f"{microseconds / 1_000_000:.2f} s"
