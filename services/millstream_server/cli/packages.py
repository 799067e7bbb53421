"""Checks of what is installed, without importing any of it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from millstream_server.cli.findings import Finding, miss, ok, warn

_OURS = "millstream"
_GPU_RECIPE = "pip install 'millstream[gpu]'"
_CPU_RECIPE = "pip install --no-deps -r requirements/cpu.lock"
_WITHOUT_ENGINE = "; or use `millstream up --engine simulated`, which needs none"


def python() -> Finding:
    """Compare the interpreter with what the package asks for."""
    running = ".".join(str(part) for part in sys.version_info[:3])
    wanted = importlib.metadata.metadata(_OURS)["Requires-Python"] or ""
    if SpecifierSet(wanted).contains(running):
        return ok(f"Python {running}")
    return miss(
        f"Python {running}, but {_OURS} needs {wanted}", "make a virtual environment of such"
    )


def pins() -> Iterator[Finding]:
    """Compare installed versions with the base install's pins: one line if all fit."""
    fits = True
    for requirement in _requirements(extra=""):
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


def grpc_family() -> Finding:
    """Check that all grpcio packages are of one version: generated stubs insist on it."""
    versions = {
        dist.name: dist.version
        for dist in importlib.metadata.distributions()
        if dist.name.startswith("grpcio")
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
    recipe = (_GPU_RECIPE if has_gpu else _CPU_RECIPE) + _WITHOUT_ENGINE
    for requirement in _requirements(extra="gpu"):
        installed = _version(requirement.name)
        if installed is None:
            yield miss(f"{requirement.name} is not installed", recipe)
        elif not requirement.specifier.contains(installed, prereleases=True):
            yield miss(f"{requirement.name} {installed}, not {requirement.specifier}", recipe)
        else:
            yield ok(f"{requirement.name} {installed}")
    yield _torch(has_gpu=has_gpu, recipe=recipe)


def _torch(*, has_gpu: bool, recipe: str) -> Finding:
    """Check that torch is built for what this machine has."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return miss("torch is not installed", recipe)
    version, cuda = torch_build(Path(spec.origin).with_name("version.py"))
    if has_gpu and not cuda:
        return miss(f"torch {version} is built without CUDA, but there is a GPU", _GPU_RECIPE)
    if not has_gpu and cuda:
        return warn(
            f"torch {version} is built for CUDA {cuda}, but there is no GPU",
            f"the CPU build is much smaller: {_CPU_RECIPE}",
        )
    return ok(f"torch {version} ({'CUDA ' + cuda if cuda else 'CPU'} build)")


def torch_build(version_file: Path) -> tuple[str, str]:
    """Read version and CUDA version (empty: none) from the file torch's build leaves."""
    try:
        text = version_file.read_text(encoding="utf-8")
    except OSError:
        text = ""
    version = re.search(r"^__version__\s*=\s*['\"](.+?)['\"]", text, re.MULTILINE)
    cuda = re.search(r"^cuda\b[^=\n]*=\s*['\"](.+?)['\"]", text, re.MULTILINE)
    return version[1] if version else "?", cuda[1] if cuda else ""


def buf() -> Finding:
    """Look for the tool our examples probe services with."""
    beside_us = Path(sys.executable).with_name("buf")
    if shutil.which("buf") or beside_us.is_file():
        return ok("buf is installed")
    return warn("buf is not installed; `buf curl` probes any service", "pip install buf-bin")


def _requirements(*, extra: str) -> Iterator[Requirement]:
    """Answer our requirements of the base install, or those that an extra adds."""
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
