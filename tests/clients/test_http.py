"""Clients of the HTTP API from npm: OpenAI's own, and LangChain's tool loop."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.clients.client_builds import need
from tests.support.processor.reading import CALL, reading_model, serving
from tests.support.processor.saying import saying

_FOLDER = Path(__file__).with_name("http")
_ASKS = f"hm</think>\n\nLet me see.\n{CALL}"
_ANSWERS = "so</think>Yes, -3."

pytestmark = pytest.mark.timeout(60)


async def _printed(program: str, folder: Path, *answers: str) -> tuple[list[Any], list[str]]:
    """Run a program against a model that gives these answers; return its lines, and the prompts."""
    need("node", _FOLDER / "node_modules")
    model = reading_model(folder)
    async with serving(model) as front:
        with saying(model, *answers) as prompts:
            process = await asyncio.create_subprocess_exec(
                *("node", str(_FOLDER / program), front.address),
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
            said, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()
    return [json.loads(line) for line in said.splitlines()], prompts


async def test_openais_client(tmp_path: Path) -> None:
    (found,), prompts = await _printed("openai.mjs", tmp_path, _ANSWERS, _ASKS, _ANSWERS)
    usage = found.pop("usage")
    assert found == {
        "model": "tiny",
        "reasoning": "so",
        "text": "Yes, -3.",
        "calls": [{"s": "Oslo"}],
        "answer": "Yes, -3.",
        "refused": [404, "model_not_found", True],
    }
    assert usage["completion_tokens"] == len(_ANSWERS) + 1
    assert '{"s": "Oslo"}]|tool:-3|' in prompts[2]


async def test_langchains_tool_loop(tmp_path: Path) -> None:
    said, prompts = await _printed("langchain.mjs", tmp_path, *[_ASKS, _ANSWERS] * 2)
    loop = [
        {"text": "Let me see.", "calls": [["f", {"s": "Oslo"}]], "used": len(_ASKS) + 1},
        {"text": "Yes, -3.", "calls": [], "used": len(_ANSWERS) + 1},
    ]
    assert said == [*loop, *loop]
    assert all('{"s": "Oslo"}]|tool:-3|' in prompt for prompt in prompts[1::2])
