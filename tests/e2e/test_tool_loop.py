"""The demo model on real SGLang, prefill and decode apart: it calls a function and answers."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from millstream_client import CallArguments, Client, TextPiece, ToolResult
from tests.support.processes.ports import free_port
from tests.support.processes.suite import ServiceProcess, stop_all

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(400)]

_MODEL = Path("demo/model").resolve()
_LOOPS = 50
_AT_ONCE = 4
_CITIES = ("Paris", "London", "Berlin", "Cairo", "Lima", "Delhi", "Shanghai", "Seattle", "Dublin")
"""Some that the model can spell."""
_SKIES = ("sunny", "cloudy")


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
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
            service.wait_serving(timeout_s=300)
        yield front.address
    finally:
        stop_all(*services)


async def test_a_function_is_called_and_its_result_is_in_the_answer(address: str) -> None:
    async with Client(address) as client:
        chance = random.Random(28)
        gate = asyncio.Semaphore(_AT_ONCE)

        async def one() -> str:
            async with gate:
                return await _loop(client, chance.choice(_CITIES), chance.choice(_SKIES))

        said = await asyncio.gather(*(one() for _ in range(_LOOPS)))
        assert [wrong for wrong in said if wrong] == []


async def _loop(client: Client, city: str, sky: str) -> str:
    """Ask for the weather; return what is wrong with the loop."""
    asked: list[str] = []

    def get_weather(city: str) -> str:
        """Get the weather."""
        asked.append(city)
        return f"{sky}, 17 degrees"

    question = f"What is the weather in {city}?"
    run = client.chat(question, tools=[get_weather], temperature=0).run_tools()
    events = [event async for event in run]
    pieces = [event.text for event in events if isinstance(event, TextPiece)]
    results = [event for event in events if isinstance(event, ToolResult)]
    streamed = len(pieces) > 1 and any(isinstance(event, CallArguments) for event in events)
    text = "".join(pieces)
    good = asked == [city] and len(results) == 1 and streamed and f"and {sky} in {city}." in text
    return "" if good else f"{question!r}: {asked}, {text!r}, {results}"
