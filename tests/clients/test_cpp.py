"""The example client in C++: its stubs are made, compiled and run."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.client_checks import ExampleChecks

_EXAMPLE = Path(__file__).with_name("cpp")
_TOOLS = ("cmake", "make", "g++", "protoc", "grpc_cpp_plugin")
# Half a minute on two idle cores; on busy ones more.
pytestmark = pytest.mark.timeout(300)


class TestCpp(ExampleChecks):
    @pytest.fixture(scope="class")
    @classmethod
    def command(cls, pytestconfig: pytest.Config) -> list[str]:
        missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
        if missing:
            pytest.skip(f"needs {', '.join(missing)}: run `make setup-clients`")
        assert pytestconfig.cache is not None
        folder = pytestconfig.cache.mkdir("example-cpp")  # kept: make compiles what has changed
        for command in (
            ["cmake", "-S", str(_EXAMPLE), "-B", ".", "-D", "CMAKE_CXX_FLAGS=-O0"],
            ["make", "--silent", "-j2"],
        ):
            done = subprocess.run(
                command, cwd=folder, capture_output=True, text=True, check=False, timeout=240
            )
            assert done.returncode == 0, done.stdout + done.stderr
        return [str(folder / "example")]
