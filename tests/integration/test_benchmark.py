"""The benchmark runs and prints what docs/benchmarks.md describes; its figures are not checked."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from tests.support.processes import forked

HERE = Path(__file__).resolve().parents[2]
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
        *("--streams", "1,8", "--steps-ms", "0,2", "--seconds", "0.2"),
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert [(row["step_ms"], row["streams"]) for row in rows] == [(0, 1), (0, 8), (2, 1), (2, 8)]
    for row in rows:
        assert set(row) > ASKED_FOR
        assert all(row[name] >= 0 for name in ASKED_FOR)
        assert row["tokens_per_s"] > 0


async def test_two_checkouts_are_compared_with_a_connection_for_each_stream() -> None:
    done = await asyncio.to_thread(
        forked.run,
        "services",
        *("tests.benchmarks.stream", "--json", "--streams", "8", "--steps-ms", "2"),
        *("--seconds", "0.2", "--connections", "each", "--max-pace-s", "0"),
        *("--against", str(HERE), "--rounds", "1", "--any-load", "--bound", "100"),
        *("--figures", "ttft_ms_p50"),
    )
    assert done.returncode == 0, done.stderr
    figures = {each.pop("figure"): each for each in json.loads(done.stdout)["compared"]}
    assert {each["row"] for each in figures.values()} == {"8 streams, 2 ms, 8 connections"}
    assert {name for name, each in figures.items() if each["verdict"] == "met"} == {"ttft_ms_p50"}
    assert {"processor_us_per_token", "worker_us_per_token"} < {*figures}
