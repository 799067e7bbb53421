"""The load of a vLLM engine, from what its ranks have said last; vLLM isn't needed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from millstream_server.control.engine import EngineLoad, RankLoad, Role
from millstream_server.engines.vllm.loads import read_load
from millstream_server.engines.vllm.runs import Run, Runs
from millstream_server.generation.output import CollectingSink
from millstream_server.generation.request import GenerationRequest, Prompt
from millstream_server.generation.sampling import Sampling

BLOCKS = 100


def _runs(*prompts: int) -> Runs:
    runs = Runs(Role.AGGREGATED, 1.0, lambda _: None)
    for length in prompts:
        request = GenerationRequest(
            prompt=Prompt((1,) * length), sampling=Sampling(max_new_tokens=1)
        )
        run = Run(request=request, sink=CollectingSink(), core_id=request.engine_id)
        runs._by_id[request.engine_id] = run
    return runs


def _said(runs: Runs, rank: int, running: int, waiting: int, usage: float) -> None:
    runs.outputs.stats[rank] = SimpleNamespace(
        num_running_reqs=running,
        num_waiting_reqs=waiting,
        num_skipped_waiting_reqs=0,
        kv_cache_usage=usage,
    )


def _load(runs: Runs, ranks: int = 1) -> EngineLoad:
    built: Any = SimpleNamespace(ranks=ranks, rank_blocks=BLOCKS)
    return read_load(built, runs)


async def test_blocks_that_an_idle_rank_still_has_are_told() -> None:
    runs = _runs()
    assert _load(runs).used_blocks == 0
    _said(runs, 0, running=1, waiting=0, usage=0.07)
    load = _load(runs)
    assert (load.used_blocks, load.total_blocks) == (7, BLOCKS)
    assert (load.running_requests, load.queued_requests) == (0, 0)
    _said(runs, 0, running=0, waiting=0, usage=0.0)
    assert _load(runs).used_blocks == 0


async def test_requests_on_their_way_are_queued_with_their_prompts() -> None:
    runs = _runs(5, 7, 11)
    _said(runs, 0, running=1, waiting=1, usage=0.5)
    load = _load(runs)
    assert (load.running_requests, load.queued_requests) == (1, 2)
    assert load.ranks == (
        RankLoad(
            running_requests=1,
            queued_requests=2,
            queued_tokens=18,
            used_blocks=50,
            total_blocks=BLOCKS,
        ),
    )


async def test_several_ranks_are_summed() -> None:
    runs = _runs(1, 1, 1)
    _said(runs, 1, running=2, waiting=0, usage=0.25)
    load = _load(runs, ranks=2)
    assert [rank.used_blocks for rank in load.ranks] == [0, 25]
    assert [rank.queued_requests for rank in load.ranks] == [0, 0]
    assert (load.running_requests, load.queued_requests) == (2, 1)
    assert (load.used_blocks, load.total_blocks) == (25, 2 * BLOCKS)
