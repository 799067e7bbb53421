"""Prefill and decode of two data-parallel ranks each: all pairs, their caches and loads."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from millstream_server.control.engine import Role
from millstream_server.engines.vllm.config import VllmEngineConfig
from millstream_server.engines.vllm.engine import VllmEngine
from millstream_server.generation.request import GenerationRequest, new_engine_id
from millstream_server.generation.ticket import EngineData, TicketKey
from millstream_server.kv_cache.hashing import block_hashes
from millstream_testing.waiting import until
from tests.support.engines.vllm_engines import LONG, PROMPTS, Started, generation, result
from tests.support.processes.ports import free_port
from tests.support.worker.kv_view import KvView

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="session")]

_RANKS = 2
_POOL = 4096
_BLOCK = 32
_LEASE_S = 6.0


@dataclass
class Pair:
    """A prefill and a decode engine."""

    prefill: Started
    decode: Started
    kv: KvView

    def legs(
        self, token_ids: list[int], prefill_rank: int, decode_rank: int, count: int
    ) -> list[GenerationRequest]:
        """Make a request's two legs, on these ranks."""
        transfer = self.prefill.info.kv_transfer
        assert transfer is not None
        data = EngineData(transfer.kind, transfer.data)
        ticket = TicketKey(bytes(32)).mint("127.0.0.1", 0, prefill_rank, data)
        return [
            generation(
                token_ids,
                count,
                ticket=ticket,
                dp_rank=rank,
                engine_id=new_engine_id(),
                ignore_eos=True,
            )
            for rank in (prefill_rank, decode_rank)
        ]

    async def run(self, token_ids: list[int], prefill_rank: int, decode_rank: int) -> list[int]:
        """Run a request on two ranks; return its tokens."""
        first, second = self.legs(token_ids, prefill_rank, decode_rank, 8)
        decoded = self.decode.submit(second)
        await asyncio.gather(result(self.prefill.submit(first)), result(decoded))
        return decoded.token_ids


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def pair(model: Path) -> AsyncIterator[Pair]:
    kv = KvView()
    engines = [
        VllmEngine(
            VllmEngineConfig(
                model_path=str(model),
                role=role,
                bootstrap_port=free_port(),
                max_total_tokens=_POOL,
                # Decode runs one request at a time: others can be made to wait.
                max_running_requests=16 if role is Role.PREFILL else 1,
                transfer_timeout_s=_LEASE_S,
                extra={"data_parallel_size": _RANKS},
            )
        )
        for role in (Role.PREFILL, Role.DECODE)
    ]
    engines[0].follow_kv(kv)
    try:
        started = []
        for engine in engines:
            info = await engine.start(lambda _: None)
            await engine.warm_up()
            started.append(Started(engine, info, []))
        prefill, decode = started
        yield Pair(prefill, decode, kv)
    finally:
        await asyncio.gather(*(engine.close() for engine in engines))


async def test_info(pair: Pair) -> None:
    for engine in (pair.prefill, pair.decode):
        assert engine.info.dp_ranks == range(_RANKS)
        assert engine.info.total_blocks == _RANKS * _POOL // _BLOCK


async def test_all_pairs_give_the_right_answer(pair: Pair, expected: list[list[int]]) -> None:
    for prefill_rank, decode_rank in itertools.product(range(_RANKS), repeat=2):
        got = await pair.run(PROMPTS[12], prefill_rank, decode_rank)
        assert got[: len(expected[12])] == expected[12][:8]


async def test_each_rank_tells_of_its_own_cache(pair: Pair) -> None:
    for rank in range(_RANKS):
        ids = [*range(200 + 100 * rank, 280 + 100 * rank)]
        await pair.run(ids, rank, 1 - rank)
        await _holds(pair.kv, rank, set(block_hashes(ids, _BLOCK)))


async def _holds(kv: KvView, rank: int, hashes: set[int]) -> None:
    await until(lambda: hashes <= kv.ranks[rank])
    assert not hashes & kv.ranks[1 - rank]


async def test_each_rank_has_its_own_load(pair: Pair) -> None:
    rank, other = 1, 0
    first, second = pair.legs([77] * 200, 0, rank, LONG)
    decoded, prefilled = pair.decode.submit(second), pair.prefill.submit(first)
    await decoded.first_token()
    load = await pair.decode.engine.load()
    assert load.running_requests == load.ranks[rank].running_requests == 1
    assert load.ranks[rank].used_blocks >= 200 // _BLOCK
    assert load.ranks[rank].total_blocks == _POOL // _BLOCK
    assert load.ranks[other].running_requests == load.ranks[other].used_blocks == 0
    await pair.decode.abort(second, decoded)
    await result(prefilled)
    await _idle(pair)


async def _idle(pair: Pair) -> None:
    async def idle() -> bool:
        loads = [await engine.engine.load() for engine in (pair.prefill, pair.decode)]
        return not any(load.used_blocks or load.running_requests for load in loads)

    await until(idle, 60)


async def test_prefill_lets_go_of_what_no_decode_takes(pair: Pair) -> None:
    """Decode's worker was killed before its core had the request."""
    first, _ = pair.legs([78] * 200, 0, 1, 8)
    await result(pair.prefill.submit(first))
    await _idle(pair)


async def test_prefill_keeps_what_decode_has_in_its_queue(pair: Pair) -> None:
    """Decode tells prefill that it lives, so the lease doesn't end while it has no room."""
    others = [generation([n] * 40, 1900, dp_rank=1, ignore_eos=True) for n in range(60, 70)]
    sinks = [pair.decode.submit(other) for other in others]
    await sinks[0].first_token()
    first, second = pair.legs(PROMPTS[12], 0, 1, 8)
    decoded = pair.decode.submit(second)
    await result(pair.prefill.submit(first))
    await asyncio.sleep(_LEASE_S + 3)
    assert not sinks[-1].token_ids, "the other requests were too few"
    assert (await pair.prefill.engine.load()).used_blocks
    for other in others:
        pair.decode.engine.abort(other.engine_id)
    await result(decoded)
    assert decoded.token_ids == await pair.run(PROMPTS[12], 0, 1)
    await _idle(pair)
