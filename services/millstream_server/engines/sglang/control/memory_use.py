"""Measures the memory of an engine's processes."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Collection
from pathlib import Path
from typing import Any

from millstream_server.control.operations import MemoryUse


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
