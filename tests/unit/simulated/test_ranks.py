"""Data-parallel ranks of the simulated engine: own queues, own steps, own caches."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from millstream_server.control.engine import RankLoad, Role
from millstream_server.engines.simulated.engine import SimulatedEngine
from millstream_server.generation.output import CollectingSink
from millstream_server.generation.ticket import Ticket
from millstream_server.runtime.errors import EngineFailedError, InvalidRequestError, KvTransferError
from millstream_testing.waiting import until
from tests.support.worker.simulated_engine import CONFIG, asked, finished, running, stored

TWO = replace(CONFIG, dp_size=2)


async def test_each_rank_has_its_own_cache_and_tells_of_it() -> None:
    async with running(TWO) as (engine, followed):
        cached = [
            (await finished(engine, asked(range(9), dp_rank=rank))).cached_tokens
            for rank in (1, 0, 1)
        ]
    assert cached == [0, 0, 8]
    assert followed.told == [(1, stored(range(8))), (0, stored(range(8)))]


async def test_without_a_rank_the_one_with_fewest_requests_runs_it() -> None:
    async with running(replace(TWO, step_s=60, max_running_requests=4)) as (engine, _):
        requests = [
            *(asked(range(8), dp_rank=1) for _ in range(2)),
            *(asked(range(4)) for _ in range(2)),
            *(asked(range(8), 4, dp_rank=1) for _ in range(2)),
        ]
        for request in requests:
            engine.submit(request, CollectingSink())
        load = await engine.load()
        for request in requests:
            engine.abort(request.engine_id)
    assert load.ranks == (
        RankLoad(running_requests=2, queued_requests=0, used_blocks=4, total_blocks=32),
        RankLoad(
            running_requests=2, queued_requests=2, queued_tokens=16, used_blocks=6, total_blocks=32
        ),
    )
    assert (load.running_requests, load.queued_requests) == (4, 2)
    assert (load.used_blocks, load.total_blocks) == (10, 64)


@pytest.mark.parametrize("dp_rank", [-1, 2])
async def test_a_rank_that_is_not_there_is_refused(dp_rank: int) -> None:
    async with running(TWO) as (engine, _):
        with pytest.raises(InvalidRequestError) as caught:
            await finished(engine, asked([1], dp_rank=dp_rank))
    (violation,) = caught.value.violations
    assert violation.field == "dp_rank"
    assert violation.description == f"{dp_rank} is not one of the 2 ranks (0 to 1)"


async def test_one_rank_hangs_alone() -> None:
    async with running(TWO) as (engine, _):
        engine.wedge(1)
        stuck, sink = asked([1], dp_rank=1), CollectingSink()
        engine.submit(stuck, sink)
        before = engine.progress(0), engine.progress(1)
        await engine.probe(0)
        await finished(engine, asked([1], 5, dp_rank=0))
        assert engine.progress(0) > before[0]
        assert (engine.progress(1), sink.token_ids) == (before[1], [])
        engine.unwedge()
        await sink.result()
        await engine.probe(1)
        assert engine.progress(1) > before[1]


@pytest.mark.parametrize(
    ("named", "ran_on", "sentence"),
    [
        (1, None, None),
        (None, None, None),
        (0, 1, "rank 0, but rank 1 computed"),
        (None, 1, "rank None, but rank 1 computed"),
    ],
)
async def test_a_ticket_names_the_rank_of_prefill(
    named: int | None, ran_on: int | None, sentence: str | None
) -> None:
    prefill = SimulatedEngine(replace(TWO, role=Role.PREFILL))
    info = await prefill.start(lambda _: None)
    try:
        async with running(replace(TWO, role=Role.DECODE)) as (decode, _):
            ticket = Ticket(info.bootstrap_host, info.bootstrap_port, 5, prefill_dp_rank=named)
            first = CollectingSink()
            prefill.submit(asked(range(9), dp_rank=ran_on, ticket=ticket), first)
            answer = finished(decode, asked(range(9), 3, dp_rank=1, ticket=ticket))
            if sentence is None:
                assert (await answer).completion_tokens == 3
                await asyncio.wait_for(first.result(), 5)
                assert prefill.progress(named or 0) == 1
            else:
                with pytest.raises(KvTransferError, match=sentence):
                    await answer
    finally:
        await prefill.close()


async def test_requests_of_all_ranks_fail_when_it_closes() -> None:
    engine = SimulatedEngine(replace(TWO, step_s=60))
    await engine.start(lambda _: None)
    sinks = [CollectingSink() for _ in range(4)]
    for sink in sinks:
        engine.submit(asked([1], 9), sink)
    await until(lambda: all(sink.token_ids for sink in sinks))
    await engine.close()
    for sink in sinks:
        with pytest.raises(EngineFailedError, match="closed"):
            await sink.result()
