"""The demo model on real SGLang, prefill and decode apart: it calls a clock and a calculator."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from millstream_client import Client, TextPiece, ToolResult
from tests.support.processes.ports import free_port
from tests.support.processes.suite import ServiceProcess, stop_all

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(400)]

_MODEL = Path("demo/model").resolve()
_LOOPS = 50
_AT_ONCE = 4
_TIMES = ("What time is it?", "What is the time?", "Tell me the time.")
_WORDS = {"*": "times", "+": "plus", "-": "minus"}


@pytest.fixture(scope="module")
async def address(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[str]:
    logs = tmp_path_factory.mktemp("logs")
    common = {"model_path": _MODEL, "model_name": "demo", "max_total_tokens": 16384}
    prefill = ServiceProcess(
        "millstream_server.prefill", {**common, "bootstrap_port": free_port()}, logs / "prefill.log"
    )
    decode = ServiceProcess(
        "millstream_server.decode", {**common, "mode": "disaggregated"}, logs / "decode.log"
    )
    flags = {"models": f"demo={_MODEL}", "workers": f"{prefill.address},{decode.address}"}
    front = ServiceProcess("millstream_server.processor", flags, logs / "front.log")
    services = (prefill, decode, front)
    try:
        for service in services:
            service.start()
        for service in services:
            await asyncio.to_thread(service.wait_serving, timeout_s=300)
        yield front.address
    finally:
        stop_all(*services)


async def test_the_clock_and_the_calculator_are_called_and_answered(address: str) -> None:
    async with Client(address) as client:
        chance = random.Random(28)
        gate = asyncio.Semaphore(_AT_ONCE)

        async def one(number: int) -> str:
            async with gate:
                return await _loop(client, chance, clocks=number % 2 == 0, thinks=number % 4 > 1)

        said = await asyncio.gather(*map(one, range(_LOOPS)))
        assert [wrong for wrong in said if wrong] == []


async def _loop(client: Client, chance: random.Random, *, clocks: bool, thinks: bool) -> str:
    """Ask for the time or for a value; return what is wrong with the answer."""
    now = f"{chance.randrange(24):02}:{chance.randrange(60):02}"
    left, right, sign = chance.randrange(2, 100), chance.randrange(2, 100), chance.choice("*+-")
    value = {"*": left * right, "+": left + right, "-": left - right}[sign]
    expected = f"{left} {sign} {right}"

    def clock() -> str:
        """Tell the time."""
        return now

    def calculate(expression: str) -> str:
        """Work out an expression, such as 6 * 7."""
        return str(value) if expression == expected else "error: not what was asked"

    question = chance.choice(_TIMES) if clocks else f"What is {left} {_WORDS[sign]} {right}?"
    wanted = f"It is {now}." if clocks else f"{expected} = {value}."
    functions: list[Callable[..., str]] = [clock, calculate]
    tools = chance.sample(functions, 2)
    run = client.chat(question, tools=tools, reasoning=thinks, temperature=0).run_tools()
    events = [event async for event in run]
    pieces = [event.text for event in events if isinstance(event, TextPiece)]
    results = [event for event in events if isinstance(event, ToolResult)]
    thought = all(answer.reasoning for answer in run.answers) or not thinks
    good = "".join(pieces) == wanted and len(results) == 1 and len(pieces) > 1 and thought
    return "" if good else f"{question!r}: {''.join(pieces)!r}, {[str(r) for r in results]}"
