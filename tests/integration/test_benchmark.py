"""The benchmark runs and prints what docs/benchmarks.md says; its figures are nobody's test."""

from __future__ import annotations

import asyncio
import json
import sys

ASKED_FOR = {
    "streams",
    "worker_us_per_token",
    "processor_us_per_token",
    "tokens_per_s",
    "ttft_ms_p50",
    "ttft_ms_p99",
    "direct_ttft_ms_p50",
    "tokens_per_message",
    "worker_rss_mb",
    "processor_rss_mb",
    "step_ms",
}


async def test_it_prints_one_object() -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.benchmarks.stream", "--json"),
        *("--streams", "1,4", "--steps-ms", "0,2", "--seconds", "0.2"),
        stdout=asyncio.subprocess.PIPE,
    )
    output = (await process.communicate())[0]
    assert process.returncode == 0
    rows = json.loads(output)["rows"]
    assert [(row["step_ms"], row["streams"]) for row in rows] == [(0, 1), (0, 4), (2, 1), (2, 4)]
    for row in rows:
        assert set(row) > ASKED_FOR
        assert all(value >= 0 for value in row.values())
        assert row["tokens_per_s"] > 0
