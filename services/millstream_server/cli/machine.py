"""Checks of this machine: hardware, and installed packages, without importing them."""

from __future__ import annotations

import contextlib
import enum
import importlib.metadata
import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from millstream_server.engines.torch_on_cpu import torch_build
from millstream_server.runtime.lifecycle.python import wrong_python

GIB = 2**30
_CPU_SUITE_BYTES = 3 * GIB
"""For prefill, decode and the Processor, 1.1 GiB with the demo model, and a reserve."""
_MULTIMODAL_BYTES = 4 * GIB
"""The same with an encode worker."""
_EVERY_SERVICE_BYTES = 5 * GIB
"""Of `up --all`, as README.md says."""
_SIMULATED_SUITE_BYTES = GIB
_DISK_BYTES = GIB
_SHM_BYTES = GIB
_NVIDIA_SMI_TIMEOUT_S = 20
_CGROUP_FILES = (
    ("memory.max", "memory.current"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
)
"""What a container may use, and uses: cgroups of version 2, and of 1."""
_OURS = "millstream"
_GPU_RECIPE = "pip install 'millstream[gpu]'"
_CPU_RECIPE = "run `make setup` in a checkout of Millstream"
_CUDA_PACKAGES = ("nvidia-", "cuda-", "triton")
_WITHOUT_ENGINE = "; or use `millstream up --engine simulated`, which needs none"


class Level(enum.IntEnum):
    """Severity of a finding."""

    OK = 0
    WARN = 1
    """It works, or isn't needed everywhere."""
    MISS = 2
    """The default suite won't run."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report; ``next_step`` is the advice."""

    level: Level
    what: str
    next_step: str = ""


def ok(what: str) -> Finding:
    """Make a finding without a problem."""
    return Finding(Level.OK, what)


def warn(what: str, next_step: str) -> Finding:
    """Make a warning."""
    return Finding(Level.WARN, what, next_step)


def miss(what: str, next_step: str) -> Finding:
    """Make a finding that something needed is missing."""
    return Finding(Level.MISS, what, next_step)


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
    *,
    has_gpu: bool,
    simulated: bool = False,
    multimodal: bool = False,
    every_service: bool = False,
    proc: Path = Path("/proc"),
    cgroup: Path = Path("/sys/fs/cgroup"),
) -> Finding:
    """Compare available memory with what such a suite needs; by default a disaggregated one."""
    needed, smaller = _CPU_SUITE_BYTES, "`millstream up --topology aggregated`"
    if every_service:
        needed, smaller = _EVERY_SERVICE_BYTES, "`millstream up` without --all"
    elif multimodal:
        needed, smaller = _MULTIMODAL_BYTES, "`millstream up` without --multimodal"
    if simulated:
        needed = _SIMULATED_SUITE_BYTES
    available = _available_memory(proc, cgroup)
    if available is None:
        return warn(
            "memory: this system doesn't tell how much is available",
            f"have {needed / GIB:.0f} GiB or more",
        )
    text = f"memory: {available / GIB:.1f} GiB available"
    if available >= needed:
        return ok(text)
    if has_gpu:
        return warn(f"{text}; loading weights may need more", "close other programs")
    if available >= _SIMULATED_SUITE_BYTES:
        return miss(
            f"{text}; this suite takes {needed / GIB:.0f} GiB on the CPU",
            f"{smaller}, or with --engine simulated, needs less",
        )
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
    for limit, used in _CGROUP_FILES:
        with contextlib.suppress(OSError, ValueError):  # of the other version, or "max"
            left = int((cgroup / limit).read_text()) - int((cgroup / used).read_text())
            return min(available, left)
    return available


def disk(directory: Path) -> Finding:
    """Check the free disk space, for logs."""
    free = shutil.disk_usage(directory).free
    text = f"disk: {free / GIB:.1f} GiB free in {directory}"
    if free >= _DISK_BYTES:
        return ok(text)
    return warn(text, "free some, or point --log-dir elsewhere")


def shared_memory(
    directory: Path, advice: str = "in a container, start it with --shm-size=1g or more"
) -> Finding:
    """Check the size of shared memory, which an engine's processes use."""
    if not directory.is_dir():
        return warn(f"there is no {directory}", "engines may fall back to slower ways, or fail")
    total = shutil.disk_usage(directory).total
    text = f"shared memory: {directory} has {total / GIB:.1f} GiB"
    if total >= _SHM_BYTES:
        return ok(text)
    return warn(text, advice)


def read_json(path: Path) -> Any:
    """Read a JSON file."""
    return json.loads(path.read_text(encoding="utf-8"))


def python() -> Finding:
    """Compare the interpreter's version with what services run on."""
    if why := wrong_python():
        return miss(why, "make a virtual environment of such; the client runs on this one")
    return ok("Python " + ".".join(map(str, sys.version_info[:3])))


def pins() -> Iterator[Finding]:
    """Compare installed versions with what a suite needs: one line if all fit."""
    fits = True
    for requirement in (
        r for extra in ("", "processor", "cli") for r in _requirements(extra=extra)
    ):
        installed = _version(requirement.name)
        wanted = f"pip install '{requirement.name}{requirement.specifier}'"
        if installed is None:
            fits = False
            yield miss(f"{requirement.name} is not installed", wanted)
        elif not requirement.specifier.contains(installed, prereleases=True):
            fits = False
            yield miss(f"{requirement.name} {installed} is installed", wanted)
    if fits:
        yield ok("installed packages are the versions we pin")


def services_lack() -> list[str]:
    """List the packages that services need and that aren't installed."""
    return [r.name for r in _requirements(extra="processor") if _version(r.name) is None]


def grpc_family() -> Finding:
    """Check that all grpcio packages have one version, as their own stubs require."""
    versions = {
        dist.name: dist.version
        for dist in importlib.metadata.distributions()
        # The generator of our stubs is older on purpose; nothing that runs imports it.
        if dist.name.startswith("grpcio") and dist.name.replace("_", "-") != "grpcio-tools"
    }
    if len(set(versions.values())) == 1:
        return ok(f"{len(versions)} grpcio packages, all {versions['grpcio']}")
    listed = ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))
    return miss(
        f"grpcio packages differ: {listed}",
        "install one version of all: pip install "
        + " ".join(f"{name}=={versions.get('grpcio', '')}" for name in sorted(versions)),
    )


def engine(*, has_gpu: bool) -> Iterator[Finding]:
    """Check SGLang, torch and the KV transfer."""
    recipe = _recipe(has_gpu=has_gpu)
    every_service = {requirement.name for requirement in _requirements(extra="processor")}
    for requirement in _requirements(extra="gpu"):
        if requirement.name in every_service:
            continue  # `gpu` includes `processor`, which `pins` checks
        installed = _version(requirement.name)
        if installed is None:
            yield miss(f"{requirement.name} is not installed", recipe)
        elif not requirement.specifier.contains(installed, prereleases=True):
            yield miss(f"{requirement.name} {installed}, not {requirement.specifier}", recipe)
        else:
            yield ok(f"{requirement.name} {installed}")
    yield from torch(has_gpu=has_gpu, recipe=recipe)


def diffusers(*, has_gpu: bool) -> Iterator[Finding]:
    """Check what makes images, where the chats' engine is in another environment."""
    if (version := _version("diffusers")) is None:
        yield miss("diffusers is not installed: it makes images", _recipe(has_gpu=has_gpu))
    else:
        yield ok(f"diffusers {version}")


def _recipe(*, has_gpu: bool) -> str:
    return (_GPU_RECIPE if has_gpu else _CPU_RECIPE) + _WITHOUT_ENGINE


def torch(*, has_gpu: bool, recipe: str) -> Iterator[Finding]:
    """Check that torch's build fits this machine, and that the libraries it needs are installed.

    A CUDA build also runs on a CPU, but needs the CUDA libraries that it was linked with.
    """
    if (found := torch_build()) is None:
        yield miss("torch is not installed", recipe)
        return
    version, cuda = found
    build = f"torch {version} ({'CUDA ' + cuda if cuda else 'CPU'} build)"
    if has_gpu and not cuda:
        yield miss(f"{build}, but there is a GPU", _GPU_RECIPE)
    elif lacking := _cuda_libraries_lacking("torch"):
        yield miss(f"{build} lacks {', '.join(lacking)}: importing it fails", recipe)
    else:
        yield ok(build if has_gpu or not cuda else f"{build}; it runs on the CPU as well")
    yield _nixl_backend(cuda, recipe)


def _cuda_libraries_lacking(name: str) -> list[str]:
    """List the CUDA packages that an installed package requires and that are missing."""
    required = (Requirement(line) for line in importlib.metadata.requires(name) or ())
    return [
        requirement.name
        for requirement in required
        if requirement.name.startswith(_CUDA_PACKAGES)
        and (requirement.marker is None or requirement.marker.evaluate({"extra": ""}))
        and _version(requirement.name) is None
    ]


def _nixl_backend(cuda: str, recipe: str) -> Finding:
    """Check for the NIXL backend that NIXL will load, by torch's CUDA version."""
    wanted = f"nixl-cu{cuda.partition('.')[0]}" if cuda else ""
    names = [wanted] if wanted else ["nixl-cu13", "nixl-cu12"]
    for name in names:
        if (version := _version(name)) is not None:
            return ok(f"{name} {version}")
    return miss(f"{' or '.join(names)} is not installed: KV transfer needs it", recipe)


def buf() -> Finding:
    """Check for buf, with which the examples call services."""
    beside_us = Path(sys.executable).with_name("buf")
    if shutil.which("buf") or beside_us.is_file():
        return ok("buf is installed")
    return warn("buf is not installed; `buf curl` probes any service", "pip install buf-bin")


def _requirements(*, extra: str) -> Iterator[Requirement]:
    """Yield our requirements of the base install, or those that an extra adds."""
    for line in importlib.metadata.requires(_OURS) or ():
        requirement = Requirement(line)
        marker = requirement.marker
        base = marker is None or marker.evaluate({"extra": ""})
        if base == (not extra) and (base or (marker and marker.evaluate({"extra": extra}))):
            yield requirement


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
