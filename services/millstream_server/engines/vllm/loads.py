"""How busy vLLM's ranks are, from what each has said with its last step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from millstream_server.control.engine import EngineLoad, RankLoad
from millstream_server.engines.vllm.launch import BuiltEngine
from millstream_server.engines.vllm.runs import Runs


def read_load(built: BuiltEngine, runs: Runs) -> EngineLoad:
    """Return the load as of each rank's last step.

    vLLM takes one more step after its last request, and steps while blocks are kept for decode: so
    an idle rank has told that its blocks are back.
    """
    stats = runs.outputs.stats
    ranks = [_of_rank(stats.get(rank), built.rank_blocks, len(runs)) for rank in range(built.ranks)]
    load = EngineLoad.of_ranks(
        ranks, open_requests=len(runs), total_blocks=built.rank_blocks * built.ranks
    )
    if len(ranks) > 1:  # whose prompts wait isn't known
        return load
    only = replace(load.ranks[0], queued_tokens=_queued_tokens(runs, load.queued_requests))
    return replace(load, ranks=(only,))


def _of_rank(stats: Any, blocks: int, open_requests: int) -> RankLoad:
    """Read vLLM's `SchedulerStats`; None: the rank hasn't stepped yet."""
    if stats is None:
        return RankLoad(running_requests=0, queued_requests=0, used_blocks=0, total_blocks=blocks)
    running = min(stats.num_running_reqs, open_requests)
    waiting = stats.num_waiting_reqs + stats.num_skipped_waiting_reqs
    return RankLoad(
        running_requests=running,
        queued_requests=min(waiting, open_requests - running),
        used_blocks=round(stats.kv_cache_usage * blocks),
        total_blocks=blocks,
    )


def _queued_tokens(runs: Runs, queued: int) -> int:
    """Return the prompt tokens of the requests that have had no output yet."""
    if not queued:
        return 0
    waiting = [run for run in runs if not run.progress.emitted]
    return sum(len(run.request.token_ids) for run in waiting[-queued:])
