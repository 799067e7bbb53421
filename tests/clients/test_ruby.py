"""The example client in Ruby: its stubs are made and loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.clients.client_builds import ROOT, built, need, run
from tests.support.clients.client_checks import ExampleChecks
from tests.support.clients.client_examples import ExampleSuite

_PROGRAMS = Path(__file__).with_name("ruby")
_DESCRIPTORS = ROOT / "generated" / "descriptors" / "millstream.binpb"
_FILES = [
    f"millstream/v1/{name}.proto"
    for name in (
        *(
            "chat",
            "errors",
            "generation",
            "kv_events",
            "kv_transfer",
            "media",
            "processor",
            "sampling",
        ),
        *("tensor", "usage", "worker"),
    )
]


def _build(folder: Path) -> None:
    made = [f"--descriptor_set_in={_DESCRIPTORS}", f"--ruby_out={folder}", f"--grpc_out={folder}"]
    run(["grpc_tools_ruby_protoc", *made, *_FILES], folder)


def command(name: str = "example.rb") -> list[str]:
    """Make the stubs; return how a program is started."""
    need("ruby", "grpc_tools_ruby_protoc")
    stubs = built("ruby", [_DESCRIPTORS, Path(__file__)], _build)
    return ["ruby", "-I", str(stubs), str(_PROGRAMS / name)]


def test_the_pages_program_asks_a_question(example_suite: ExampleSuite) -> None:
    example_suite.check_ask(command("ask.rb"))
    example_suite.check_cancel(command("ask.rb"))


class TestRuby(ExampleChecks):
    @pytest.fixture(scope="class")
    @classmethod
    def command(cls) -> list[str]:
        return command()
