"""The example client in C++: its stubs are made, compiled and run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.clients.client_builds import ROOT, built, need, run
from tests.support.clients.client_checks import ExampleChecks

_EXAMPLE = Path(__file__).with_name("cpp")
_DESCRIPTORS = ROOT / "generated" / "descriptors" / "millstream.binpb"
# 15 s on two idle cores; on busy ones more.
pytestmark = pytest.mark.timeout(240)


def _build(folder: Path) -> None:
    run(["cmake", "-S", _EXAMPLE, "-B", folder, "-D", "CMAKE_CXX_FLAGS=-O0"], folder)
    run(["make", "--silent", "-j2"], folder)


class TestCpp(ExampleChecks):
    @pytest.fixture(scope="class")
    @classmethod
    def command(cls) -> list[str]:
        need("cmake", "make", "g++", "protoc", "grpc_cpp_plugin")
        return [str(built("cpp", [_EXAMPLE, _DESCRIPTORS], _build) / "example")]
