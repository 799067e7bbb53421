"""What operators' operations need in more than one engine."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import threading
from collections.abc import Awaitable, Callable, Collection
from pathlib import Path
from typing import Any

from millstream_server.control.operations import MemoryUse, Progress
from millstream_server.engines.checkpoint import (
    Checkpoint,
    check_fits,
    read_checkpoint,
    read_through,
)
from millstream_server.runtime.errors import EngineBusyError

_IDLE_LIMIT_S = 10.0
_IDLE_POLL_S = 0.02


# ---- idle engines --------------------------------------------------------------------------------


def refuse_open(count: int) -> None:
    """Refuse what an engine must be idle for.

    Raises:
        EngineBusyError: there are open requests.
    """
    if count:
        raise EngineBusyError(
            f"The engine has {count} requests; it must be idle for this. Wait until they have "
            "ended, or take the worker out of service first."
        )


async def until_flushed(flush: Callable[[], Awaitable[bool]]) -> None:
    """Call ``flush`` until it returns True: an engine lets go of a request after its end.

    Raises:
        EngineBusyError: it returned False for ten seconds.
    """
    limit_s = asyncio.get_running_loop().time() + _IDLE_LIMIT_S
    while not await flush():
        if asyncio.get_running_loop().time() > limit_s:
            raise EngineBusyError(
                f"The engine still holds requests {_IDLE_LIMIT_S:g} s after their end; retry."
            )
        await asyncio.sleep(_IDLE_POLL_S)


# ---- weights on disk -----------------------------------------------------------------------------


def check_files(path: Path, loaded: Checkpoint) -> Checkpoint:
    """Check that a directory has weights for the model that runs; takes milliseconds.

    Raises:
        InvalidWeightsError: it hasn't.
    """
    found = read_checkpoint(path)
    check_fits(found, loaded)
    return found


async def check_disk(path: Path, loaded: Checkpoint, progress: Progress) -> None:
    """Check a directory of weights in a thread, and read every byte of it.

    Raises:
        InvalidWeightsError: they don't fit, or can't be read.
    """
    stopped = threading.Event()
    loop = asyncio.get_running_loop()

    def report(done: int, total: int) -> None:
        loop.call_soon_threadsafe(progress, done, total)

    def check() -> None:
        read_through(check_files(path, loaded), report, stopped.is_set)

    try:
        await asyncio.to_thread(check)
    finally:
        stopped.set()


# ---- memory --------------------------------------------------------------------------------------


def measure(pids: Collection[int], *, on_gpu: bool) -> MemoryUse:
    """Measure the memory of processes; blocks for milliseconds. One that ended counts 0."""
    return MemoryUse(
        host_bytes=sum(map(_host_bytes, pids)),
        device_bytes=_device_bytes(pids) if on_gpu else 0,
    )


def _host_bytes(pid: int) -> int:
    """Return a process's share of resident memory, else all of it: shared pages count twice."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    psutil = importlib.import_module("psutil")
    with contextlib.suppress(psutil.Error):
        return int(psutil.Process(pid).memory_info().rss)
    return 0


def _device_bytes(pids: Collection[int]) -> int:
    """Return what the driver counts for the processes, or without NVIDIA's library 0.

    In a container the driver's process ids may be others: then what is used on the GPUs on which
    anything runs, by anybody.
    """
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError:
        return 0
    with contextlib.suppress(nvml.NVMLError):
        nvml.nvmlInit()
        try:
            return _count(nvml, pids)
        finally:
            nvml.nvmlShutdown()
    return 0


def _count(nvml: Any, pids: Collection[int]) -> int:
    ours = used = 0
    for index in range(nvml.nvmlDeviceGetCount()):
        device = nvml.nvmlDeviceGetHandleByIndex(index)
        running = nvml.nvmlDeviceGetComputeRunningProcesses(device)
        ours += sum(each.usedGpuMemory or 0 for each in running if each.pid in pids)
        used += int(nvml.nvmlDeviceGetMemoryInfo(device).used) if running else 0
    return ours or used
