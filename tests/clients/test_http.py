"""Clients of the HTTP API: OpenAI's and LangChain's from npm, and the JDK's HttpClient."""

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

pytestmark = pytest.mark.timeout(240)  # the JDK compiles for ten seconds where others work


async def _printed(program: str, folder: Path, *answers: str) -> tuple[list[Any], list[str]]:
    """Run a program against a model that gives these answers; return its lines, and the prompts."""
    if program.endswith(".java"):
        need("java", "javac")
        command = "java"
    else:
        need("node", _FOLDER / "node_modules")
        command = "node"
    model = reading_model(folder)
    async with serving(model) as front:
        with saying(model, *answers) as prompts:
            process = await asyncio.create_subprocess_exec(
                *(command, str(_FOLDER / program), front.address),
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


async def test_the_jdks_client_with_its_defaults(tmp_path: Path) -> None:
    """It offers h2c by Upgrade, with a body behind it; LangChain4j and Spring AI use it so."""
    (said,), prompts = await _printed("Jdk.java", tmp_path, *[_ANSWERS] * 5)
    whole, chunked, tokens, listed, *streams, models = said
    assert whole["choices"][0]["message"]["content"] == "Yes, -3."
    assert chunked["choices"] == whole["choices"]
    assert tokens["count"] > 0
    assert listed["models"][0]["name"] == models["data"][0]["id"] == "tiny"
    for stream in streams:
        events = [line.removeprefix("data: ") for line in stream.split("\n") if line]
        assert events.pop() == "[DONE]"
        deltas = [json.loads(event)["choices"][0]["delta"] for event in events]
        assert "".join(delta.get("content") or "" for delta in deltas) == "Yes, -3."
    assert len(prompts) == 5
