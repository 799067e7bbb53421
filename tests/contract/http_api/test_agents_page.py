"""docs/agents.md: its settings can be read, lead here, and its curl runs."""

from __future__ import annotations

import ast
import asyncio
import json
import re
import tomllib
from pathlib import Path

import pytest
import yaml

from millstream_server.processor.text.tokenizer import TextModel
from millstream_testing.alphabet import alphabet_model
from millstream_testing.in_process import MODEL, suite

_PAGE = (Path(__file__).parents[3] / "docs" / "agents.md").read_text("utf-8")
_BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", _PAGE, re.MULTILINE | re.DOTALL)
_ADDRESS = "127.0.0.1:50051"
_READ = {"json": json.loads, "toml": tomllib.loads, "yaml": yaml.safe_load, "python": ast.parse}


@pytest.mark.parametrize(("kind", "block"), _BLOCKS)
def test_a_block_can_be_read_and_has_the_address(kind: str, block: str) -> None:
    assert _ADDRESS in block or "host.docker.internal:50051" in block
    if kind != "sh":
        assert _READ[kind](block)
    # Anthropic's clients add /v1 themselves, and so does aiperf.
    assert ("/v1" in block) is not ("ANTHROPIC" in block or "aiperf" in block)


async def test_the_command_shows_the_models(tmp_path: Path) -> None:
    model = TextModel.load(alphabet_model(tmp_path / "model"))
    _, command = next(block for block in _BLOCKS if block[0] == "sh")
    async with suite(model) as (front, _):
        process = await asyncio.create_subprocess_exec(
            *("sh", "-c", command.replace(_ADDRESS, front.address)),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
        said, _ = await process.communicate()
    assert [each["id"] for each in json.loads(said)["data"]] == [MODEL]
