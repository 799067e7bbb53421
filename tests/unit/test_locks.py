"""The locks are installed without looking at dependencies, so each must name all of them."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from millstream_server.cli import machine
from millstream_server.cli.machine import Level

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
CLIENT: list[str] = PROJECT["project"]["dependencies"]
EXTRAS: dict[str, list[str]] = PROJECT["project"]["optional-dependencies"]
BASE = [*CLIENT, *EXTRAS["processor"], *EXTRAS["cli"], *EXTRAS["s3"]]
GPU = [line for line in EXTRAS["gpu"] if line != "millstream[processor]"]
VLLM = [line for line in EXTRAS["vllm"] if line != "millstream[processor]"]
DEV: list[str] = PROJECT["dependency-groups"]["dev"]


def _lines(name: str) -> list[str]:
    text = (ROOT / "requirements" / name).read_text()
    return [line.split("#")[0].strip() for line in text.splitlines() if line.split("#")[0].strip()]


def _pins(lock: str) -> dict[str, str]:
    pairs = (line.split("==") for line in _lines(lock))
    return {canonicalize_name(name): version for name, version in pairs}


def _required_by(name: str, version: str, extras: frozenset[str]) -> Iterator[Requirement]:
    """Give what a package needs, if this very version of it is installed here to be asked."""
    try:
        found = distribution(name)
    except PackageNotFoundError:
        return
    if found.version.split("+")[0] != version:
        return
    for requirement in map(Requirement, found.requires or ()):
        if requirement.marker is None or any(
            requirement.marker.evaluate({"extra": extra}) for extra in extras | {""}
        ):
            yield requirement


def _gaps(pins: dict[str, str], roots: list[str], not_asked: frozenset[str]) -> list[str]:
    """Walk from the roots; answer what is needed and not pinned, or pinned to another version."""
    found: list[str] = []
    waiting = [("the project", Requirement(root)) for root in roots]
    seen: set[tuple[str, frozenset[str]]] = set()
    while waiting:
        asker, requirement = waiting.pop()
        name, extras = canonicalize_name(requirement.name), frozenset(requirement.extras)
        version = pins.get(name)
        if version is None:
            found.append(f"{name}, needed by {asker}, is not there")
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            found.append(f"{name} is {version}; {asker} needs {requirement.specifier}")
        if (name, extras) not in seen and name not in not_asked:
            seen.add((name, extras))
            waiting += [(name, needed) for needed in _required_by(name, version, extras)]
    return sorted(found)


@pytest.mark.parametrize(
    ("lock", "roots", "not_asked"),
    [
        ("build.lock", PROJECT["build-system"]["requires"], frozenset[str]()),
        ("processor.lock", [*BASE, *EXTRAS["kubernetes"]], frozenset[str]()),
        (
            "cpu.lock",
            [*BASE, *EXTRAS["kubernetes"], *DEV, *_lines("cpu.in"), *_lines("cpu-nodeps.in")],
            frozenset({"torch", *(Requirement(line).name for line in _lines("cpu-nodeps.in"))}),
        ),
        # Asks the build of torch that is installed here.
        ("torch-cuda.lock", [f"torch=={_pins('cpu.lock')['torch']}"], frozenset[str]()),
        ("gpu.lock", [*BASE, *GPU], frozenset[str]()),
        ("vllm-gpu.lock", [*BASE, *VLLM], frozenset[str]()),
        (
            "vllm-cpu.lock",
            [
                *(*CLIENT, *EXTRAS["processor"], *EXTRAS["cli"]),
                *(*_lines("vllm-cpu.in"), *_lines("vllm-cpu-nodeps.in")),
            ],
            frozenset({"torch", "torchvision", "nixl"}),
        ),
    ],
)
def test_a_lock_is_complete(lock: str, roots: list[str], not_asked: frozenset[str]) -> None:
    # Python brings setuptools (or, from 3.12 on, nothing that needs it).
    beside = _pins("cpu.lock") if lock == "torch-cuda.lock" else {}
    assert _gaps(beside | _pins(lock) | {"setuptools": "999"}, roots, not_asked) == []


def test_doctor_misses_nothing_that_make_setup_installs(monkeypatch: pytest.MonkeyPatch) -> None:
    pins = _pins("cpu.lock") | _pins("torch-cuda.lock")
    extras = {**EXTRAS, "gpu": GPU, "vllm": VLLM}
    declared = [f"{line}; extra == '{extra}'" for extra, lines in extras.items() for line in lines]
    asked = importlib.metadata.requires

    def version(name: str) -> str:
        if (pin := pins.get(canonicalize_name(name))) is None:
            raise PackageNotFoundError(name)
        return pin

    def requires(name: str) -> list[str]:
        return [*CLIENT, *declared] if name == "millstream" else asked(name) or []

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(importlib.metadata, "requires", requires)
    found = [*machine.pins(), *machine.engine(has_gpu=False)]
    assert [finding.what for finding in found if finding.level is Level.MISS] == []
    assert f"diffusers {pins['diffusers']}" in [finding.what for finding in found]


def test_the_cuda_lock_only_adds_to_the_cpu_lock() -> None:
    assert not _pins("torch-cuda.lock").keys() & _pins("cpu.lock").keys()


@pytest.mark.parametrize("lock", ["gpu.lock", "vllm-gpu.lock"])
def test_a_gpu_lock_has_the_libraries_of_torchs_cuda_build(lock: str) -> None:
    assert _pins("torch-cuda.lock").keys() - _pins(lock).keys() == set()


def test_nixl_is_the_one_for_torchs_cuda_version() -> None:
    (cuda,) = (name for name in _pins("torch-cuda.lock") if name.startswith("nvidia-cudnn-"))
    assert f"nixl-{cuda.rpartition('-')[2]}" in _pins("cpu.lock")


def test_a_missing_package_is_noticed() -> None:
    pins = _pins("cpu.lock")
    del pins["opentelemetry-exporter-http-transport"]
    (gap,) = _gaps(pins, ["opentelemetry-exporter-otlp-proto-http"], frozenset())
    assert gap.startswith("opentelemetry-exporter-http-transport, needed by opentelemetry-exporter")


@pytest.mark.parametrize(
    ("uv", "code", "sentence"),
    [
        ("cat $LOCK", 0, ""),
        ("cat $LOCK; echo further==1.0", 1, "vllm-gpu.lock isn't what its own pins need: +further"),
        ("grep -v triton== $LOCK", 1, "gpu.lock isn't what its own pins need: -triton=="),
        ("echo No solution found >&2; exit 1", 1, "gpu.lock: No solution found"),
        ("echo Failed to fetch >&2; exit 2", 0, "gpu.lock is NOT CHECKED: Failed to fetch"),
    ],
)
def test_make_lint_resolves_each_lock_of_an_image_from_its_own_pins(
    uv: str, code: int, sentence: str, tmp_path: Path
) -> None:
    program = tmp_path / "uv"
    program.write_text(f"#!/bin/sh\nfor LOCK; do :; done\n{uv}\n")
    program.chmod(0o755)
    done = subprocess.run(
        [sys.executable, ROOT / "requirements" / "lock.py", "--check"],
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
    )
    assert (done.returncode, sentence in done.stderr) == (code, True), done.stderr
