"""`millstream chat` with reasoning and tools: the answer on stdout, all else on stderr."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.support.processes.command_line import Terminal, millstream
from tests.support.scripted_processor import CALLS, STOP, OutputEvent, called, said, serving

ANSWERS = (
    ([OutputEvent(reasoning="I look."), *called("clock", "{}")], CALLS),
    (said("It is 14:05."), STOP),
)


@pytest.fixture
def tools(tmp_path: Path) -> str:
    command = [sys.executable, "-c", "print('14:05')"]
    path = tmp_path / "tools.json"
    path.write_text(json.dumps([{"name": "clock", "command": command}]), encoding="utf-8")
    return str(path)


async def test_a_pipe_gets_the_answer_only(tools: str) -> None:
    async with serving(*ANSWERS) as (processor, address):
        done = await millstream(
            *("chat", "Time?", "--address", address, "--tools", tools, "--run-tools"),
            *("--show-reasoning", "--reasoning", "on"),
        )
        assert (done.code, done.out) == (0, "It is 14:05.\n")
        assert done.err == "I look.\n→ clock {}\n← 14:05\n"
        assert processor.results == [["14:05"]]
        assert processor.asked[0].start.reasoning.enabled


async def test_nobody_to_ask_is_an_error_for_the_model(tools: str) -> None:
    async with serving(*ANSWERS) as (processor, address):
        done = await millstream("chat", "Time?", "--address", address, "--tools", tools)
        assert (done.code, done.out) == (0, "It is 14:05.\n")
        error = "EOFError: nobody is there who could give a result"
        assert processor.results == [[{"error": error}]]


async def test_a_terminal_shows_calls_and_asks_for_their_results(tools: str) -> None:
    async with (
        serving(*ANSWERS) as (processor, address),
        Terminal(["chat", "Time?", "--address", address, "--tools", tools]) as terminal,
    ):
        await terminal.expect("→ clock {}")
        await terminal.expect("result of clock {}:")
        terminal.type("quarter past\r")
        await terminal.expect("It is 14:05.")
        assert await terminal.ends() == 0
        assert processor.results == [["quarter past"]]
