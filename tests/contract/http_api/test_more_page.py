"""docs/http.md: its snippets run, and its tables have the fields that bodies have."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path

import msgspec
import pytest

from millstream_server.processor.http import images_schema, tokens_schema, vectors_schema
from tests.support.processor.every_ability import every_ability

_PAGE = (Path(__file__).parents[3] / "docs" / "http.md").read_text("utf-8")
_ADDRESS = "127.0.0.1:50051"
_SNIPPETS = re.findall(r"^```(\w+)\n(.*?)^```", _PAGE, re.MULTILINE | re.DOTALL)
_SECTIONS: dict[str, tuple[type[msgspec.Struct], ...]] = {
    "Embeddings": (vectors_schema.Embeddings,),
    "Rerank": (vectors_schema.Rerank,),
    "Score": (vectors_schema.Score,),
    "Images": (images_schema.Generations, images_schema.Edits),
    "Tokens": (tokens_schema.Tokenize, tokens_schema.Detokenize),
}


@pytest.mark.parametrize("section", _SECTIONS)
def test_the_tables_have_every_field_and_no_other(section: str) -> None:
    text = _PAGE.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    cells = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    named = {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}
    kinds = _SECTIONS[section]
    assert named == {field.name for kind in kinds for field in msgspec.structs.fields(kind)}


SAID = [
    "0 8\n1 8\n",
    '"relevance_score":',
    '"object":"score"',
    '"seed":7,"b64_json":"',
    "event: image_generation.completed",
    '"token_strs":["u","s","e","r"',
]


async def test_the_snippets_run(tmp_path: Path) -> None:
    async with every_ability(tmp_path / "model") as suite:
        for (kind, snippet), said in zip(_SNIPPETS, SAID, strict=True):
            program = ["sh", "-c"] if kind == "sh" else [sys.executable, "-W", "error", "-c"]
            process = await asyncio.create_subprocess_exec(
                *program,
                snippet.replace(_ADDRESS, suite.front.address),
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
            out, errors = await process.communicate()
            assert process.returncode == 0, errors
            assert said in out.decode(), snippet
