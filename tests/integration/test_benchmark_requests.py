"""The benchmark of requests runs each case, alone and in pairs; its figures are not checked."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(300)  # ten suites of services, one after the other
ROOT = Path(__file__).parents[2]
CPU = {"processor_ms_per_chat", "decode_ms_per_chat", "client_ms_per_chat"}
RATES = {"chats_per_s", "busy_cores"}
MEMORY = {"processor_mb"}
TIMES = {"ttft_ms_p50", "ttft_ms_p99"}


async def _rows(*arguments: str) -> list[dict[str, Any]]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.benchmarks.requests", "--json", "--seconds", "0.3"),
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    output, progress = await process.communicate()
    assert process.returncode == 0, progress.decode()[-4000:]
    (rows,) = json.loads(output).values()
    return list(rows)


async def test_each_case_gives_its_figures() -> None:
    rows = await _rows("--topologies", "aggregated")
    assert {row["case"]: {*row} - {"topology", "case"} for row in rows} == {
        "chats": CPU | RATES | TIMES | MEMORY,
        "chats-10ms": CPU | RATES | TIMES | MEMORY,
        "burst": CPU | RATES | TIMES | MEMORY,
        "starvation": TIMES,
        "one-stream": TIMES | {"direct_ttft_ms_p50", "above_direct_ms"},
        "bare": {"bare_ms_per_chat", "client_ms_per_chat"} | RATES | TIMES,
    }
    for row in rows:
        measured = [of for name, of in row.items() if name != "above_direct_ms" and "median" in of]
        assert measured
        assert all(of["median"] > 0 for of in measured)


async def test_two_checkouts_are_compared() -> None:
    rows = await _rows(
        *("--topologies", "disaggregated", "--cases", "chats"),
        *("--against", str(ROOT), "--rounds", "1", "--any-load", "--bound", "100"),
    )
    costs = CPU - {"client_ms_per_chat"} | {"prefill_ms_per_chat"}
    assert {row["figure"] for row in rows} == costs | RATES | TIMES | MEMORY
    assert {row["figure"] for row in rows if row["verdict"] == "met"} == costs
