"""What an engine tells of its prefix cache, against what it does with it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterable
from pathlib import Path

import pytest
import pytest_asyncio

from millstream_server.kv_cache.hashing import Namespace, block_hashes
from tests.support.engines.engine_process import EngineProcess
from tests.support.engines.sglang_requests import answer, generation, prompt, result

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(420),
]

_PAGE = 4
_POOL = 600
"""Tokens: so few that blocks are evicted."""


@pytest_asyncio.fixture(scope="class", loop_scope="session")
async def paged(
    model: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[EngineProcess]:
    engine = await EngineProcess.launch(
        tmp_path_factory.mktemp("paged") / "log",
        model_path=str(model),
        max_total_tokens=_POOL,
        extra={"page_size": _PAGE, "chunked_prefill_size": 64},
        tool_call_parser="hermes",
        reasoning_parser="qwen3",
    )
    await engine.ready()
    yield engine
    assert await engine.close() == 0


async def _told(engine: EngineProcess, hashes: Iterable[int]) -> None:
    """Wait until the engine has told that these blocks are cached."""
    wanted = set(hashes)
    async with asyncio.timeout(10):
        while not wanted <= engine.kv.ranks[0]:
            await asyncio.sleep(0.002)


async def _run(
    engine: EngineProcess, token_ids: list[int], salt: str = ""
) -> tuple[list[int], int]:
    """Run a request; return the hashes of what it left behind, and its cached tokens."""
    request = generation(token_ids, max_new_tokens=random.Random(len(token_ids)).randint(1, 9))
    request = generation(token_ids, request.sampling.max_new_tokens, cache_salt=salt)
    sink = await answer(engine, request)
    full = [*token_ids, *sink.token_ids][:-1]  # the last token has no KV
    left = block_hashes(full, _PAGE, Namespace(salt=salt))
    return left, (await result(sink)).cached_tokens


class TestKvEvents:
    """The view of a follower, and the hashes that anyone can compute."""

    async def test_info(self, paged: EngineProcess) -> None:
        info = await paged.ready()
        assert info.tells_kv
        assert info.block_size == _PAGE
        assert info.total_blocks * _PAGE == _POOL
        assert info.max_batched_tokens == 64
        assert len(info.model_hash) == 64
        assert (info.tool_call_parser, info.reasoning_parser) == ("hermes", "qwen3")
        finish = await result(paged.submit(generation(prompt(5))))
        assert finish.weight_version == info.weight_version != ""

    async def test_the_view_is_what_was_asked_and_answered(self, paged: EngineProcess) -> None:
        assert await paged.flush()
        plain, _ = await _run(paged, prompt(22))
        salted, _ = await _run(paged, prompt(22), "s\u00e4lt")
        await _told(paged, plain + salted)
        assert paged.kv.ranks[0] == {*plain, *salted}
        assert await paged.flush()
        async with asyncio.timeout(10):
            while paged.kv.ranks[0]:
                await asyncio.sleep(0.002)

    async def test_the_view_predicts_every_hit(self, paged: EngineProcess) -> None:
        chance = random.Random(11)
        stems = [prompt(chance.randint(8, 90), start=100 * n) for n in range(6)]
        hits = 0
        for turn in range(60):
            if chance.random() < 0.03:
                await paged.flush()
            elif chance.random() < 0.3:
                together = [_run(paged, _draw(chance, stems)) for _ in range(3)]
                await asyncio.gather(*together)
            asked, salt = _draw(chance, stems), chance.choice(["", "", "a"])
            # A request that changes nothing: all that was told before it is here after it.
            marker, _ = await _run(paged, prompt(9, start=700 + turn))
            await _told(paged, marker)
            known = block_hashes(asked[:-1], _PAGE, Namespace(salt=salt))
            expected = 0
            while expected < len(known) and known[expected] in paged.kv.ranks[0]:
                expected += 1
            _, cached = await _run(paged, asked, salt)
            assert cached == expected * _PAGE, turn
            hits += bool(cached)
        assert 10 < hits < 60
        assert len(paged.kv.ranks[0]) <= _POOL // _PAGE


def _draw(chance: random.Random, stems: list[list[int]]) -> list[int]:
    """Draw a prompt that shares its beginning with others."""
    stem = chance.choice(stems)
    stem = stem[: chance.randint(1, len(stem))]
    return stem + prompt(chance.randint(1, 12), start=chance.randint(0, 5))
