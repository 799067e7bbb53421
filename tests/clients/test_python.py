"""The Python package in fresh environments: other Pythons, the lowest and highest dependencies."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.support.clients.client_builds import ROOT, built, need, run
from tests.support.clients.client_checks import check_cost
from tests.support.clients.client_examples import API_KEY, ExampleSuite
from tests.support.clients.tool_checks import check_tool_loop
from tests.support.processes.simulated_suite import MODEL

_PROGRAMS = Path(__file__).with_name("python")
_PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
_REQUIRED = [Requirement(line) for line in _PROJECT["dependencies"]]
_SOURCES = [
    ROOT / "services" / "millstream_client",
    ROOT / "generated" / "python",
    ROOT / "pyproject.toml",
]
_PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")
_OLDEST, _NEWEST = 11, 14

# Ten seconds each on two idle cores, most of it pip's.
pytestmark = pytest.mark.timeout(240)


@functools.cache
def _python(minor: int) -> Path | None:
    """Find a Python 3.MINOR that runs; pyenv's needn't be on PATH."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    name = f"python3.{minor}"
    found = [sys.executable] if minor == sys.version_info.minor else []
    found += filter(None, [shutil.which(name)])
    found += map(str, sorted(pyenv.glob(f"versions/3.{minor}.*/bin/{name}")))
    for one in found:
        if subprocess.run([one, "--version"], capture_output=True, check=False).returncode == 0:
            return Path(one)
    return None


@functools.cache
def _reaches_index() -> bool:
    probe = [*_PIP, "install", "--dry-run", "--no-deps", "--ignore-installed", "hatchling"]
    return subprocess.run(probe, capture_output=True, check=False).returncode == 0


@pytest.fixture(scope="module")
def wheel() -> Path:
    """The package as hatchling makes it."""
    if not _reaches_index():
        need("a package index that pip reaches")
    (found,) = built("python-wheel", _SOURCES, _build_wheel).glob("*.whl")
    return found


def _build_wheel(folder: Path) -> None:
    run([*_PIP, "wheel", "--no-deps", "--wheel-dir", folder, ROOT], folder)


def _environment(folder: Path, minor: int, *packages: str | Path) -> Path:
    """Make a fresh environment with these packages; returns its Python."""
    base = _python(minor)
    if base is None:
        pytest.skip(f"there is no Python 3.{minor} here")
    run([base, "-m", "venv", "--without-pip", folder], folder.parent)
    python = folder / "bin" / "python"
    run([*_PIP, "--python", python, "install", "--only-binary", ":all:", *packages], folder)
    return python


def _lowest() -> list[str]:
    """Pin what the package needs to the lower bounds."""
    bounds = {
        one.name: next(spec.version for spec in one.specifier if spec.operator == ">=")
        for one in _REQUIRED
    }
    return [f"{name}=={version}" for name, version in bounds.items()]


def _said(suite: ExampleSuite, python: Path) -> list[str]:
    """Run the program, with warnings as errors."""
    arguments = [suite.processors[0].address, MODEL, API_KEY]
    # Isolated: PYTHONPATH may name this repository's folders.
    done = run([python, "-I", "-W", "error", _PROGRAMS / "program.py", *arguments], python.parent)
    assert done.stderr == ""
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def newest(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """This Python with the newest versions, and what mypy needs to know of the libraries."""
    folder = tmp_path_factory.mktemp("newest") / "venv"
    types = ("types-protobuf", "grpc-stubs")
    return _environment(folder, sys.version_info.minor, wheel, *types)


@pytest.mark.parametrize("minor", range(_OLDEST, _NEWEST + 1))
def test_the_client_runs_on_the_newest_versions(
    example_suite: ExampleSuite, wheel: Path, newest: Path, tmp_path: Path, minor: int
) -> None:
    own = minor == sys.version_info.minor
    python = newest if own else _environment(tmp_path / "venv", minor, wheel)
    version, libraries, *answers = _said(example_suite, python)
    assert version == f"3.{minor}"
    assert "protobuf 7." in libraries
    assert answers == ["ABCDE 5", "options.sampling.top_p"]


def test_the_client_runs_on_the_lowest_versions(
    example_suite: ExampleSuite, wheel: Path, tmp_path: Path
) -> None:
    python = _environment(tmp_path / "venv", sys.version_info.minor, wheel, *_lowest())
    _, libraries, *answers = _said(example_suite, python)
    assert "protobuf 6." in libraries  # what many other packages need
    assert answers == ["ABCDE 5", "options.sampling.top_p"]


def test_mypy_knows_the_types_in_a_project_of_somebody_else(newest: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mypy", "--strict", "--no-incremental"]
    program = subprocess.run(
        [*command, "--python-executable", newest, *sorted(_PROGRAMS.iterdir())],
        cwd=tmp_path,
        env={**os.environ, "MYPYPATH": "", "PYTHONPATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [line.partition(": ")[2] for line in program.stdout.splitlines()]
    revealed = [line.partition('"')[2].rstrip('"') for line in lines if "Revealed" in line]
    errors = [line for line in lines if line.startswith("error")]
    call = "grpc.aio.UnaryStreamCall[millstream.v1.processor_pb2.CompleteRequest, "
    assert revealed == [
        "str",
        "float",
        call + "millstream.v1.processor_pb2.CompleteResponse]",
        "str",
    ], program.stdout
    (error,) = errors
    assert 'Unexpected keyword argument "modell"' in error


def test_the_tool_loop() -> None:
    check_tool_loop([sys.executable, _PROGRAMS / "tools.py"])


def command() -> list[str]:
    """Return how calls are made by grpcio alone."""
    return [sys.executable, str(ROOT / "tests" / "support" / "clients" / "calls.py")]


def test_the_service_config_costs_what_round_robin_does(example_suite: ExampleSuite) -> None:
    check_cost(example_suite, command(), command())
