"""Checks of the hardware: GPUs, memory, disk, shared memory."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

from millstream_server.cli.findings import Finding, miss, ok, warn

GIB = 2**30
_CPU_SUITE_BYTES = 6 * GIB
"""For prefill and decode, about 2 GiB each, the Processor, and a reserve."""
_SIMULATED_SUITE_BYTES = GIB
_DISK_BYTES = GIB
_SHM_BYTES = GIB
_NVIDIA_SMI_TIMEOUT_S = 20


def gpus() -> list[str]:
    """List the NVIDIA GPUs by name; empty without any."""
    if (program := shutil.which("nvidia-smi")) is not None:
        try:
            listed = subprocess.run(  # noqa: S603 - a fixed command
                [program, "--query-gpu=name,memory.total", "--format=csv,noheader"],
                capture_output=True,
                text=True,
                timeout=_NVIDIA_SMI_TIMEOUT_S,
                check=True,
            )
        except (OSError, subprocess.SubprocessError):
            pass  # the driver hangs or is broken: look for device files instead
        else:
            return listed.stdout.strip().splitlines()
    return [str(path) for path in sorted(Path("/dev").glob("nvidia[0-9]*"))]


def gpu_finding(names: list[str]) -> Finding:
    """Report whether engines run on a GPU or the CPU."""
    if names:
        return ok(f"GPU: {'; '.join(names)}")
    return ok("no GPU: engines run on the CPU, which is right for small models only")


def memory(
    *, has_gpu: bool, proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")
) -> Finding:
    """Compare available memory with what a disaggregated suite needs."""
    available = _available_memory(proc, cgroup)
    if available is None:
        return warn("memory: this system doesn't tell how much is available", "have 6 GiB or more")
    text = f"memory: {available / GIB:.1f} GiB available"
    if available >= _CPU_SUITE_BYTES:
        return ok(text)
    if has_gpu:
        return warn(f"{text}; loading weights may need more", "close other programs")
    small = "`millstream up --topology aggregated` or `--engine simulated` needs less"
    if available >= _SIMULATED_SUITE_BYTES:
        return miss(f"{text}; a disaggregated suite on the CPU takes 6 GiB", small)
    return miss(f"{text}; that is too little for any suite", "close other programs")


def _available_memory(proc: Path, cgroup: Path) -> int | None:
    """Return the machine's available memory, or what the container may still use if less."""
    try:
        fields = dict(
            line.split(":", 1)
            for line in (proc / "meminfo").read_text().splitlines()
            if ":" in line
        )
        available = int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None
    try:
        limit = int((cgroup / "memory.max").read_text())
        used = int((cgroup / "memory.current").read_text())
    except (OSError, ValueError):  # No cgroup v2, or "max".
        return available
    return min(available, limit - used)


def disk(directory: Path) -> Finding:
    """Check the free disk space, for logs."""
    free = shutil.disk_usage(directory).free
    text = f"disk: {free / GIB:.1f} GiB free in {directory}"
    if free >= _DISK_BYTES:
        return ok(text)
    return warn(text, "free some, or point --log-dir elsewhere")


def shared_memory(directory: Path) -> Finding:
    """Check the size of shared memory, which an engine's processes use."""
    if not directory.is_dir():
        return warn(f"there is no {directory}", "engines may fall back to slower ways, or fail")
    total = shutil.disk_usage(directory).total
    text = f"shared memory: {directory} has {total / GIB:.1f} GiB"
    if total >= _SHM_BYTES:
        return ok(text)
    return warn(text, "in a container, start it with --shm-size=1g or more")


def read_json(path: Path) -> Any:
    """Read a JSON file."""
    return json.loads(path.read_text(encoding="utf-8"))
