"""requirements/install.py: which build of PyTorch `make setup` takes, and what counts as there."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

FILE = Path(__file__).parents[2] / "requirements" / "install.py"
NEEDS_CUDA = ("filelock", "nvidia-cudnn-cu13==9.20.0.48; platform_system == 'Linux'")


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("millstream_install", FILE)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # Dataclasses look their module up.
    spec.loader.exec_module(module)
    return module


script = _load()
CPU = script.Build("2.13.0+cpu", ("filelock",))
CUDA = script.Build("2.13.0", NEEDS_CUDA)


@pytest.mark.parametrize(
    ("requires", "needs_cuda"),
    [
        ((), False),
        (("filelock", "sympy>=1.13.3"), False),
        (NEEDS_CUDA, True),
        (("cuda-toolkit[cublas]==13.0.3",), True),
    ],
)
def test_a_build_is_told_by_what_it_requires(
    requires: tuple[str, ...], *, needs_cuda: bool
) -> None:
    assert script.Build("2.13.0", requires).needs_cuda is needs_cuda


@pytest.mark.parametrize("found", [CPU, script.Build("2.13.0", ("filelock",))])
def test_the_cpu_build_that_pip_finds_is_taken_and_the_index_not_asked(found: object) -> None:
    choice = script.choose(found, lambda: pytest.fail("asked PyTorch's index"))
    assert choice.build == found
    assert choice.pip_options == ()
    assert "which pip finds as configured" in choice.sentence


@pytest.mark.parametrize(
    ("build", "lines"),
    [(CPU, ["torch===2.13.0+cpu"]), (CUDA, ["torch===2.13.0", "nvidia-cudnn-cu13==9.20.0.48"])],
)
def test_images_install_the_same_choice(
    build: object, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "choose_torch", lambda _: script.Choice(build, "…"))
    found = script.torch_requirements(script.SGLANG).split()
    assert found[0] == lines[0]
    assert set(lines) <= set(found)
    assert (len(found) > 1) is (build == CUDA)
    if build == CUDA:
        with pytest.raises(script.InstallError, match="the CUDA build of PyTorch only"):
            script.torch_requirements(script.VLLM)


def test_else_the_one_on_pytorchs_index() -> None:
    choice = script.choose(CUDA, lambda: CPU)
    assert choice.build == CPU
    assert choice.pip_options == ("--index-url", script.CPU_INDEX)
    assert script.CPU_INDEX in choice.sentence
    assert "0.2 GB" in choice.sentence


@pytest.mark.parametrize("on_index", [None, CUDA])
def test_else_the_cuda_build(on_index: object) -> None:
    choice = script.choose(CUDA, lambda: on_index)
    assert choice.build == CUDA
    assert choice.pip_options == ()
    assert "4.7 GB" in choice.sentence
    assert "finds no CPU build" in choice.sentence


def test_pips_report_is_read() -> None:
    metadata = {"name": "torch", "version": "2.13.0", "requires_dist": list(NEEDS_CUDA)}
    assert script.reported_build(json.dumps({"install": [{"metadata": metadata}]})) == CUDA
    del metadata["requires_dist"]
    report = json.dumps({"install": [{"metadata": metadata}]})
    assert script.reported_build(report) == script.Build("2.13.0")


def test_pins_are_read_by_canonical_name(tmp_path: Path) -> None:
    lock = tmp_path / "a.lock"
    lock.write_text("# Written by `make lock`\nJinja2==3.1.6\nprompt_toolkit==3.0.53 # why\n")
    assert script.read_pins(lock) == {"jinja2": "3.1.6", "prompt-toolkit": "3.0.53"}


def test_any_build_of_a_version_is_that_version() -> None:
    pins = {"torch": "2.13.0", "numpy": "2.4.6", "rich": "15.0.0"}
    there = {"torch": "2.13.0+cpu", "numpy": "2.4.5"}
    assert script.missing(pins, there) == {"numpy": "2.4.6", "rich": "15.0.0"}


def _put(site: Path, name: str, version: str, *requires: str, complete: bool = True) -> None:
    folder = site / f"{name}-{version}.dist-info"
    folder.mkdir(parents=True)
    lines = [f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {r}" for r in requires)]
    (folder / "METADATA").write_text("\n".join(lines) + "\n")
    if complete:
        (folder / "RECORD").touch()


def test_a_package_whose_installation_was_interrupted_is_not_there(tmp_path: Path) -> None:
    _put(tmp_path, "prompt_toolkit", "3.0.53")
    _put(tmp_path, "torch", "2.13.0", complete=False)
    assert script.installed(tmp_path) == {"prompt-toolkit": "3.0.53"}
    script.forget_incomplete(tmp_path)
    assert [folder.name for folder in tmp_path.iterdir()] == ["prompt_toolkit-3.0.53.dist-info"]


def test_the_installed_build_is_read(tmp_path: Path) -> None:
    assert script.installed_torch(tmp_path, {}) is None
    _put(tmp_path, "torch", "2.13.0", *NEEDS_CUDA)
    assert script.installed_torch(tmp_path, script.installed(tmp_path)) == CUDA


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("Collecting aiohttp==3.14.5 (from -r x)\n", "looking for aiohttp"),
        ("  Downloading numpy-2.4.6-cp311-manylinux.whl.metadata (62 kB)\n", "looking for numpy"),
        ("Downloading numpy-2.4.6-cp311-manylinux.whl (16.9 MB)\n", "downloading numpy (16.9 MB)"),
        (
            "Downloading https://host/a/torch-2.13.0-cp311.whl (526.1 MB)\n",
            "downloading torch (526.1 MB)",
        ),
        ("Installing collected packages: torch, numpy\n", "unpacking"),
        ("Obtaining file:///checkout\n", "building the project's own package"),
        ("  Preparing metadata (pyproject.toml): started\n", None),
    ],
)
def test_pips_lines_become_progress(line: str, expected: str | None) -> None:
    assert script.step(line) == expected
