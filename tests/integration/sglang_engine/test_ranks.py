"""Prefill and decode of two data-parallel ranks each: all pairs, their caches and loads."""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from millstream_server.control.engine import Role
from millstream_server.generation.ticket import Ticket
from millstream_server.kv_cache.hashing import block_hashes
from millstream_server.runtime.errors import InvalidRequestError
from tests.support.engines.engine_process import EngineProcess
from tests.support.engines.sglang_requests import LONG, PROMPTS, answer, generation, prompt, result
from tests.support.processes.ports import free_port
from tests.support.processes.preloads import NESTED_VARIABLE

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(420),
]

_RANKS = 2
_POOL = 4096
_ROOMS = itertools.count(secrets.randbits(40))  # odd and even ones


class Pair:
    """A prefill and a decode engine."""

    def __init__(self, prefill: EngineProcess, decode: EngineProcess, port: int) -> None:
        self.prefill = prefill
        self.decode = decode
        self._port = port

    async def run(
        self, token_ids: list[int], prefill_rank: int | None, decode_rank: int
    ) -> list[int]:
        """Run a request on two ranks; return its tokens."""
        ticket = Ticket("127.0.0.1", self._port, next(_ROOMS), prefill_dp_rank=prefill_rank)
        decoded = self.decode.submit(generation(token_ids, ticket=ticket, dp_rank=decode_rank))
        prefilled = self.prefill.submit(generation(token_ids, ticket=ticket, dp_rank=prefill_rank))
        await asyncio.gather(result(decoded), result(prefilled))
        return decoded.token_ids


@pytest_asyncio.fixture(scope="class", loop_scope="session")
async def pair(
    model: Path, tmp_path_factory: pytest.TempPathFactory, expected: list[list[int]]
) -> AsyncIterator[Pair]:
    del expected
    logs = tmp_path_factory.mktemp("ranks")
    port = free_port()
    prefill, decode = [
        await EngineProcess.launch(
            logs / role.value,
            role=role,
            bootstrap_port=port,
            model_path=str(model),
            max_total_tokens=_POOL,
            transfer_timeout_s=60.0,
            extra={"dp_size": _RANKS},
            env={"SGLANG_CPU_OMP_THREADS_BIND": "0|1", NESTED_VARIABLE: "1"},
        )
        for role in (Role.PREFILL, Role.DECODE)
    ]
    await asyncio.gather(prefill.ready(), decode.ready())
    yield Pair(prefill, decode, port)
    await decode.close()
    await prefill.close()


async def _holds(engine: EngineProcess, rank: int, token_ids: list[int]) -> None:
    async with asyncio.timeout(10):
        while not set(block_hashes(token_ids, 1)) <= engine.kv.ranks[rank]:
            await asyncio.sleep(0.002)


class TestRanks:
    """Two ranks on both sides."""

    async def test_info(self, pair: Pair) -> None:
        prefill, decode = await pair.prefill.ready(), await pair.decode.ready()
        assert (prefill.dp_start, prefill.dp_size) == (0, _RANKS)
        assert prefill.total_blocks == _RANKS * _POOL
        assert prefill.tells_kv
        assert not decode.tells_kv, "its radix cache is off"

    async def test_all_pairs_give_the_aggregated_answer(
        self, pair: Pair, expected: list[list[int]]
    ) -> None:
        for prefill_rank, decode_rank in itertools.product(range(_RANKS), repeat=2):
            assert await pair.run(PROMPTS[2], prefill_rank, decode_rank) == expected[2]

    async def test_an_older_processor_names_no_rank(
        self, pair: Pair, expected: list[list[int]]
    ) -> None:
        for _ in range(2):
            assert await pair.run(PROMPTS[1], None, 1) == expected[1]

    async def test_each_rank_tells_of_its_own_cache(self, pair: Pair) -> None:
        for rank in range(_RANKS):
            await pair.run(prompt(30, start=200 + rank), rank, 1 - rank)
            await _holds(pair.prefill, rank, prompt(30, start=200 + rank))
        for rank in range(_RANKS):
            other = set(block_hashes(prompt(30, start=200 + rank), 1))
            assert not other & pair.prefill.kv.ranks[1 - rank]
        assert not any(pair.decode.kv.ranks.values())

    async def test_each_rank_has_its_own_load(self, pair: Pair) -> None:
        rank, other = 1, 0
        ticket = Ticket("127.0.0.1", pair._port, next(_ROOMS), prefill_dp_rank=0)
        request = generation(prompt(200), LONG, ticket=ticket, dp_rank=rank, ignore_eos=True)
        decoded = pair.decode.submit(request)
        prefilled = pair.prefill.submit(generation(prompt(200), ticket=ticket, dp_rank=0))
        await decoded.first_token()
        async with asyncio.timeout(10):
            while not (load := await pair.decode.load()).ranks[rank].running_requests:
                await asyncio.sleep(0.005)
        assert load.running_requests == load.ranks[rank].running_requests == 1
        assert load.ranks[rank].used_blocks >= 200
        assert load.ranks[rank].total_blocks == _POOL
        assert load.ranks[other].running_requests == load.ranks[other].used_blocks == 0
        assert load.total_blocks == _RANKS * _POOL
        assert load.used_blocks == load.ranks[rank].used_blocks
        pair.decode.abort(request.engine_id)
        await asyncio.gather(result(decoded), result(prefilled))

    async def test_a_rank_that_isnt_there_is_refused(self, pair: Pair) -> None:
        ticket = Ticket("127.0.0.1", pair._port, next(_ROOMS), prefill_dp_rank=0)
        with pytest.raises(InvalidRequestError):
            await answer(pair.decode, generation(prompt(5), ticket=ticket, dp_rank=_RANKS))
