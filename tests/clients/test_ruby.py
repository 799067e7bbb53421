"""The example client in Ruby: its stubs are made and loaded."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.client_checks import ExampleChecks

_EXAMPLE = Path(__file__).parent / "ruby" / "example.rb"
_DESCRIPTORS = Path(__file__).parents[2] / "generated" / "descriptors" / "millstream.binpb"
_MESSAGES = ("chat", "errors", "generation", "kv_transfer", "media", "sampling", "tensor", "usage")


class TestRuby(ExampleChecks):
    @pytest.fixture(scope="class")
    @classmethod
    def command(cls, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
        tools = ("ruby", "grpc_tools_ruby_protoc")
        missing = [tool for tool in tools if shutil.which(tool) is None]
        if missing:
            pytest.skip(f"needs {', '.join(missing)}: run `make setup-clients`")
        stubs = tmp_path_factory.mktemp("ruby")
        files = [f"millstream/v1/{name}.proto" for name in (*_MESSAGES, "processor", "worker")]
        subprocess.run(
            [
                "grpc_tools_ruby_protoc",
                f"--descriptor_set_in={_DESCRIPTORS}",
                f"--ruby_out={stubs}",
                f"--grpc_out={stubs}",
                *files,
            ],
            check=True,
            timeout=60,
        )
        return ["ruby", "-w", "-I", str(stubs), str(_EXAMPLE)]
