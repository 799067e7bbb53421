"""The demo model on real SGLang, prefill and decode apart: it calls functions, and it thinks."""

from __future__ import annotations

import asyncio
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from millstream_client import Client
from tests.support.demo_tools import USES, clock, run_loop
from tests.support.processes.command_line import millstream
from tests.support.processes.ports import free_port
from tests.support.processes.suite import ServiceProcess, stop_all

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(400)]

_MODEL = Path("demo/model").resolve()
_README = Path(__file__).parents[2] / "README.md"


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


@pytest.mark.parametrize("kind", USES)
async def test_a_function_is_called_and_its_result_is_in_the_answer(
    address: str, kind: str
) -> None:
    draw = random.Random(28)
    async with Client(address) as client:
        outcomes = [await run_loop(client, USES[kind](draw), reasoning=False) for _ in range(3)]
    assert [outcome.wrong for outcome in outcomes if outcome.wrong] == []


async def test_the_example_of_the_readme_is_a_real_call(address: str) -> None:
    snippets = re.findall(r"^```python\n(.*?)^```", _README.read_text(), re.MULTILINE | re.DOTALL)
    (code,) = (snippet for snippet in snippets if "run_tools" in snippet)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", code.replace("127.0.0.1:50051", address)),
        stdout=asyncio.subprocess.PIPE,
    )
    printed = (await process.communicate())[0].decode()
    assert re.match(r"It is \d\d:\d\d\.\n.*name='clock'", printed), printed


async def test_it_thinks_before_a_call_and_before_its_answer(address: str) -> None:
    async with Client(address) as client:
        outcome = await run_loop(client, clock(random.Random(28)), reasoning=True)
    assert outcome.wrong == ""


async def test_the_command_line_shows_its_thoughts(address: str) -> None:
    asked = ("chat", "What is prefill?", "--address", address, "--reasoning", "on")
    done = await millstream(*asked, "--show-reasoning", "--temperature", "0")
    assert done.code == 0, done.err
    assert "This is about prefill." in done.err
    assert "first step of inference" in done.out
