"""requirements/install.py with the real pip, which finds small made-up wheels and no network."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pip
import pytest

from tests.support.models.fake_wheels import make_wheel

INSTALL = Path(__file__).parents[2] / "requirements" / "install.py"
PROJECT = """\
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]

[project]
name = "project"
version = "1"

[tool.millstream]
services-python = ">=3.{first},<3.{after}"
"""
# Enough for `pip install --editable .` without a package index.
BACKEND = """\
import shutil
def build_editable(folder, *_):
    shutil.copy("project-1-py3-none-any.whl", folder)
    return "project-1-py3-none-any.whl"
"""
# The CUDA build can't be imported without its library, as the real one.
CPU_TORCH = {"torch/__init__.py": ""}
CUDA_TORCH = {"torch/__init__.py": "import nvidia_lib; nms = 1"}
# Neither can PyPI's torchvision without an operator that its compiled part brings.
CPU_VISION = {"torchvision/__init__.py": ""}
CUDA_VISION = {"torchvision/__init__.py": "import torch; torch.nms"}
HOOK = "torchvision_on_cpu.pth"
DECLARE = """\
import torch
def declare_torchvision_operators(): torch.nms = 1
"""


class Machine:
    """A checkout with a venv, and what pip finds there."""

    def __init__(self, root: Path) -> None:
        self.checkout = root / "checkout"
        self.wheels = root / "wheels"
        self.cpu_index = root / "cpu_index"
        self.python = self.checkout / ".venv" / "bin" / "python"
        self.stamp = self.checkout / ".venv" / ".ready"
        pages = [self.cpu_index / name for name in ("torch", "torchvision")]
        for folder in (self.checkout / "requirements", self.wheels, *pages):
            folder.mkdir(parents=True)
        for page in pages:
            (page / "index.html").write_text("<!DOCTYPE html><html></html>")
        self.write_project(sys.version_info[1])
        (self.checkout / "backend.py").write_text(BACKEND)
        ours = {"millstream_server/engines/torch_on_cpu.py": DECLARE}
        make_wheel(self.checkout, "project", "1", files=ours)
        requirements = self.checkout / "requirements"
        (requirements / "cpu.lock").write_text("torch==1.0\ntorchvision==1.0\nnixl==1.0\n")
        (requirements / "torch-cuda.lock").write_text("nvidia-lib==1.0\n")
        script = INSTALL.read_text().replace(
            'CPU_INDEX = "https://download.pytorch.org/whl/cpu"',
            f'CPU_INDEX = "{self.cpu_index.as_uri()}"',
        )
        (requirements / "install.py").write_text(script)
        shutil.copy(INSTALL.with_name("torchvision_on_cpu.py"), requirements)
        assert self.cpu_index.as_uri() in script
        make_wheel(self.wheels, "nvidia_lib", "1.0", files={"nvidia_lib.py": ""})
        make_wheel(self.wheels, "nixl", "1.0", files={"nixl.py": "import torch; nixl_agent = 1"})
        make_wheel(self.wheels, "torch", "1.0", requires=["nvidia-lib==1.0"], files=CUDA_TORCH)
        make_wheel(self.wheels, "torchvision", "1.0", files=CUDA_VISION)
        venv.create(self.checkout / ".venv", symlinks=True)
        # The pip that runs here, since copying one into each venv takes seconds.
        (self.site / "pip").symlink_to(Path(pip.__file__).parent)

    def write_project(self, minor: int) -> None:
        text = PROJECT.format(first=minor, after=minor + 1)
        (self.checkout / "pyproject.toml").write_text(text)

    def offer_cpu_build(self, folder: Path) -> None:
        make_wheel(folder, "torch", "1.0+cpu", files=CPU_TORCH)

    def install(self, *arguments: str, python: Path | None = None) -> tuple[int, str]:
        """Run the script; returns its exit status and output."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
        empty_index = (self.checkout / "backend.py").as_uri()
        environment = {
            **kept,
            "PYTHONPATH": "",
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_INDEX_URL": empty_index,
            "PIP_FIND_LINKS": str(self.wheels),
        }
        ran = subprocess.run(
            [python or self.python, "requirements/install.py", *arguments],
            cwd=self.checkout,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        return ran.returncode, ran.stdout + ran.stderr

    @property
    def site(self) -> Path:
        (site,) = (self.checkout / ".venv" / "lib").glob("python3*/site-packages")
        return site

    def can_import_torchvision(self) -> bool:
        code = [str(self.python), "-c", "import torchvision"]
        return not subprocess.run(code, env={"PYTHONPATH": ""}, check=False).returncode

    def torch_builds(self) -> list[str]:
        return [folder.name for folder in self.site.glob("torch-*.dist-info")]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_the_cpu_build_that_pip_finds(machine: Machine) -> None:
    machine.offer_cpu_build(machine.wheels)
    code, output = machine.install()
    assert code == 0, output
    assert "the CPU build, 1.0+cpu, which pip finds as configured" in output
    assert machine.torch_builds() == ["torch-1.0+cpu.dist-info"]
    assert not list(machine.site.glob("nvidia_lib*"))
    assert machine.can_import_torchvision()
    assert (machine.site / HOOK).is_file()
    assert machine.install() == (0, "")  # Nothing left to do, nothing said.


def test_the_cpu_build_of_pytorchs_index(machine: Machine) -> None:
    machine.offer_cpu_build(machine.cpu_index / "torch")
    make_wheel(machine.cpu_index / "torchvision", "torchvision", "1.0+cpu", files=CPU_VISION)
    for name in ("torch", "torchvision"):
        (machine.cpu_index / name / "index.html").write_text(
            f'<!DOCTYPE html><html><a href="{name}-1.0%2Bcpu-py3-none-any.whl">{name}</a></html>'
        )
    code, output = machine.install()
    assert code == 0, output
    assert f"the CPU build, 1.0+cpu, from {machine.cpu_index.as_uri()}" in output
    assert machine.torch_builds() == ["torch-1.0+cpu.dist-info"]
    assert (machine.site / "torchvision-1.0+cpu.dist-info").is_dir()
    assert machine.can_import_torchvision()
    assert not (machine.site / HOOK).exists()


def test_the_cuda_build_comes_with_its_libraries_and_survives_what_interrupts(
    machine: Machine,
) -> None:
    code, output = machine.install()
    assert code == 0, output
    assert "the CUDA build, 1.0, with its CUDA libraries" in output
    assert not (machine.site / HOOK).exists()
    assert machine.torch_builds() == ["torch-1.0.dist-info"]
    assert list(machine.site.glob("nvidia_lib.py"))
    # As an older setup, or a run that was killed while pip unpacked a package, leaves it.
    (machine.site / "nvidia_lib-1.0.dist-info" / "RECORD").unlink()
    (machine.site / "nvidia_lib.py").unlink()
    machine.offer_cpu_build(machine.wheels)  # The smaller build may have become available since.
    code, output = machine.install()
    assert code == 0, output
    assert machine.torch_builds() == ["torch-1.0+cpu.dist-info"]


def test_an_import_that_fails_leaves_nothing_ready_and_says_what_to_do(machine: Machine) -> None:
    make_wheel(machine.wheels, "nixl", "1.0", files={"nixl.py": "import no_such_part"})
    code, output = machine.install()
    assert code == 1
    assert "No module named 'no_such_part'" in output
    assert "make clean; make setup" in output
    assert not machine.stamp.exists()
    shutil.rmtree(machine.site / "nixl-1.0.dist-info")
    make_wheel(machine.wheels, "nixl", "1.0", files={"nixl.py": "import torch; nixl_agent = 1"})
    code, output = machine.install()
    assert code == 0, output
    assert "PyTorch: " not in output  # What was installed is kept: no second choice.


def test_a_python_that_does_not_fit(machine: Machine) -> None:
    machine.write_project(sys.version_info[1] + 1)
    code, output = machine.install()
    assert code == 1
    assert f"Millstream needs 3.{sys.version_info[1] + 1} to 3." in output
    assert "make setup PYTHON=" in output


def test_nothing_is_installed_outside_a_virtual_environment(machine: Machine) -> None:
    outside = Path(sys.base_prefix) / "bin" / f"python3.{sys.version_info[1]}"
    code, output = machine.install(python=outside)
    assert code == 1
    assert "isn't in a virtual environment" in output
    assert machine.install("--probe", python=outside) == (1, "")


def test_a_half_made_environment_is_noticed(machine: Machine) -> None:
    assert machine.install("--probe") == (0, "")
    (machine.site / "pip").unlink()
    assert machine.install("--probe") == (1, "")


def test_pip_finds_nothing(machine: Machine) -> None:
    for wheel in machine.wheels.glob("torch*"):
        wheel.unlink()
    code, output = machine.install()
    assert code == 1
    assert "pip finds no torch==1.0" in output
    assert "Is the package index reachable?" in output
