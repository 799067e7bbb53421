"""The benchmark runs and prints what docs/benchmarks.md describes; its figures are not checked."""

from __future__ import annotations

import asyncio
import json

from tests.support import forked

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
    done = await asyncio.to_thread(
        forked.run,
        "services",
        *("tests.benchmarks.stream", "--json"),
        *("--streams", "1,4", "--steps-ms", "0,2", "--seconds", "0.2"),
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert [(row["step_ms"], row["streams"]) for row in rows] == [(0, 1), (0, 4), (2, 1), (2, 4)]
    for row in rows:
        assert set(row) > ASKED_FOR
        assert all(value >= 0 for value in row.values())
        assert row["tokens_per_s"] > 0
