"""The example client in C++: its stubs are made, compiled and run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.clients.client_builds import ROOT, built, need, run
from tests.support.clients.client_checks import ExampleChecks
from tests.support.clients.client_examples import ExampleSuite

_EXAMPLE = Path(__file__).with_name("cpp")
_DESCRIPTORS = ROOT / "generated" / "descriptors" / "millstream.binpb"
# 15 s on two idle cores; on busy ones more.
pytestmark = pytest.mark.timeout(480)


def _build(folder: Path) -> None:
    """Build both programs, as the page says but for the optimization; the stubs once."""
    stubs = ["-D", f"MILLSTREAM_DESCRIPTORS={_DESCRIPTORS}", "-D", "CMAKE_CXX_FLAGS=-O0"]
    for program in ("example", "ask"):
        run(["cmake", "-S", _EXAMPLE, "-B", folder, "-D", f"PROGRAM={program}", *stubs], folder)
        run(["cmake", "--build", folder, "-j2"], folder)


def _built() -> Path:
    need("cmake", "make", "g++", "protoc", "grpc_cpp_plugin")
    return built("cpp", [_EXAMPLE, _DESCRIPTORS], _build)


def test_the_pages_program_asks_a_question(example_suite: ExampleSuite) -> None:
    example_suite.check_ask([_built() / "ask"])


def command() -> list[str]:
    """Build the example; return how it is started."""
    return [str(_built() / "example")]


class TestCpp(ExampleChecks):
    @pytest.fixture(scope="class")
    @classmethod
    def command(cls) -> list[str]:
        return command()
