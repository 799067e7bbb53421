"""docs/openai.md: its snippets run, and its tables have the fields that bodies have."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path

import msgspec
import pytest

from millstream_server.processor.http import anthropic_schema, schema
from millstream_server.processor.http.errors import refuse
from millstream_server.processor.text.tokenizer import TextModel
from millstream_server.runtime.errors import InvalidRequestError
from millstream_testing.alphabet import alphabet_model
from millstream_testing.in_process import suite

_PAGE = (Path(__file__).parents[3] / "docs" / "openai.md").read_text("utf-8")
_ADDRESS = "127.0.0.1:50051"
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def _named(section: str, before: str) -> set[str]:
    """Return the names in the first column of a section's table, up to a text behind it."""
    table = _PAGE.partition(section)[2].partition(before)[0]
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    return {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}


def test_the_tables_have_every_field_and_no_other() -> None:
    kinds = (schema.Chat, schema.Completion)
    known = {field.name for kind in kinds for field in msgspec.structs.fields(kind)}
    refused = {*schema.UNSUPPORTED, "best_of"}
    assert _named("## Fields", "These are refused") == known - refused
    assert _named("These are refused by name", "## Answers") == refused


def test_the_table_of_messages_has_every_field_and_no_other() -> None:
    fields = {field.name for field in msgspec.structs.fields(anthropic_schema.Messages)}
    assert _named("## Anthropic's Messages", "- A block is closed") == fields


def test_the_codes_are_those_that_are_sent() -> None:
    body = refuse(InvalidRequestError("the context length of 5 tokens")).body
    code = msgspec.json.decode(body)["error"]["code"]
    assert f"`{code}`" in _PAGE


@pytest.mark.parametrize("kind", ["sh", "python"])
async def test_a_snippet_runs(tmp_path: Path, kind: str) -> None:
    (snippet,) = [code for language, code in _BLOCK.findall(_PAGE) if language == kind]
    model = TextModel.load(alphabet_model(tmp_path / "model"))
    program = ["sh", "-c"] if kind == "sh" else [sys.executable, "-W", "error", "-c"]
    async with suite(model) as (front, _):
        process = await asyncio.create_subprocess_exec(
            *program,
            snippet.replace(_ADDRESS, front.address),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        said, errors = await process.communicate()
    assert process.returncode == 0, errors
    assert b"ABCDEFGHIJKLMNOPQRST" in said
