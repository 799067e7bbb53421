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
CUDA_TORCH = {"torch/__init__.py": "import nvidia_lib"}


class Machine:
    """A checkout with a venv, and what pip finds there."""

    def __init__(self, root: Path) -> None:
        self.checkout = root / "checkout"
        self.wheels = root / "wheels"
        self.cpu_index = root / "cpu_index"
        self.python = self.checkout / ".venv" / "bin" / "python"
        self.stamp = self.checkout / ".venv" / ".ready"
        for folder in (self.checkout / "requirements", self.wheels, self.cpu_index / "torch"):
            folder.mkdir(parents=True)
        (self.cpu_index / "torch" / "index.html").write_text("<!DOCTYPE html><html></html>")
        self.write_project(sys.version_info[1])
        (self.checkout / "backend.py").write_text(BACKEND)
        make_wheel(self.checkout, "project", "1")
        requirements = self.checkout / "requirements"
        (requirements / "cpu.lock").write_text("torch==1.0\nnixl==1.0\n")
        (requirements / "torch-cuda.lock").write_text("nvidia-lib==1.0\n")
        script = INSTALL.read_text().replace(
            'CPU_INDEX = "https://download.pytorch.org/whl/cpu"',
            f'CPU_INDEX = "{self.cpu_index.as_uri()}"',
        )
        (requirements / "install.py").write_text(script)
        assert self.cpu_index.as_uri() in script
        make_wheel(self.wheels, "nvidia_lib", "1.0", files={"nvidia_lib.py": ""})
        make_wheel(self.wheels, "nixl", "1.0", files={"nixl.py": "import torch; nixl_agent = 1"})
        make_wheel(self.wheels, "torch", "1.0", requires=["nvidia-lib==1.0"], files=CUDA_TORCH)
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
    assert machine.install() == (0, "")  # Nothing left to do, nothing said.


def test_the_cpu_build_of_pytorchs_index(machine: Machine) -> None:
    page = machine.cpu_index / "torch"
    machine.offer_cpu_build(page)
    (page / "index.html").write_text(
        '<!DOCTYPE html><html><a href="torch-1.0%2Bcpu-py3-none-any.whl">torch</a></html>'
    )
    code, output = machine.install()
    assert code == 0, output
    assert f"the CPU build, 1.0+cpu, from {machine.cpu_index.as_uri()}" in output
    assert machine.torch_builds() == ["torch-1.0+cpu.dist-info"]


def test_the_cuda_build_comes_with_its_libraries_and_survives_what_interrupts(
    machine: Machine,
) -> None:
    code, output = machine.install()
    assert code == 0, output
    assert "the CUDA build, 1.0, with its CUDA libraries" in output
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
