"""The simulated engine's KV cache: what requests find in it, and the events that tell of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from millstream_server.generation.output import CollectingSink
from millstream_server.kv_cache.events import BlocksRemoved
from millstream_server.kv_cache.hashing import block_hashes
from millstream_testing.waiting import until
from tests.support.media.media_requests import MODEL, fetched, item, request
from tests.support.worker.simulated_engine import (
    CONFIG,
    asked,
    finished,
    running,
    stored,
    without_sleeping,
)


async def test_prompt_and_output_are_cached_but_for_the_last_token() -> None:
    async with running(CONFIG) as (engine, followed):
        first = await finished(engine, asked(range(10), 7))  # 10 to 16: KV for 16 tokens
        assert first.cached_tokens == 0
        assert followed.told == [(0, stored(range(8))), (0, stored(range(16), 2))]
        again = await finished(engine, asked(range(10)))
        assert again.cached_tokens == 8
        longer = await finished(engine, asked(range(18), 3))
        assert longer.cached_tokens == 16
        assert (await engine.load()).used_blocks == 0
    assert followed.told[2:] == [(0, stored(range(20), 4))]


async def test_the_last_token_of_a_prompt_is_always_computed() -> None:
    async with running(CONFIG) as (engine, _):
        assert [(await finished(engine, asked(range(8)))).cached_tokens for _ in range(2)] == [0, 4]


async def test_an_abort_leaves_what_was_computed() -> None:
    async with running(replace(CONFIG, step_s=0.002)) as (engine, followed):
        request, sink = asked(range(4), 100), CollectingSink()
        engine.submit(request, sink)
        await until(lambda: len(sink.token_ids) > 5)
        engine.abort(request.engine_id)
        computed = 4 + (await sink.result()).completion_tokens - 1
        assert [event for _, event in followed.told] == [
            stored(range(4)),
            stored(range(computed), 1),
        ]
        waits, sink = asked(range(100, 120), 8), CollectingSink()
        engine.submit(waits, sink)
        engine.abort(waits.engine_id)
        assert len(followed.told) == 2, "nothing was computed"


async def test_salts_and_adapters_share_nothing() -> None:
    async with running(CONFIG) as (engine, followed):
        salted = asked(range(8), cache_salt="a")
        cached = [
            (await finished(engine, replace(request, engine_id=str(place)))).cached_tokens
            for place, request in enumerate([asked(range(8)), salted, salted])
        ]
    assert cached == [0, 0, 4]
    assert followed.told[1:] == [(0, stored(range(8), salt="a"))]


async def test_other_media_are_other_blocks() -> None:
    async with running(replace(CONFIG, media=MODEL)) as (engine, _):
        one, other = fetched(request(item("a", 2))), fetched(request(item("b", 2)))
        cached = [
            (await finished(engine, replace(each, engine_id=str(place)))).cached_tokens
            for place, each in enumerate([one, other, one])
        ]
    assert cached[2] > cached[0] == cached[1] == 0


async def test_blocks_that_run_short_are_evicted_and_told() -> None:
    async with running(replace(CONFIG, total_blocks=4)) as (engine, followed):
        await finished(engine, asked(range(8), 1))
        await finished(engine, asked(range(20, 32), 1))
        hashes = block_hashes(range(8), 4)
        assert followed.told[1:] == [
            (0, BlocksRemoved((hashes[1], hashes[0]))),
            (0, stored(range(20, 32))),
        ]
        assert (await finished(engine, asked(range(8)))).cached_tokens == 0


async def test_prefill_takes_time_for_what_is_not_cached(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running(replace(CONFIG, prefill_s_per_token=1.0)) as (engine, _):
        slept = without_sleeping(monkeypatch)
        await finished(engine, asked(range(10)))
        await finished(engine, asked(range(10)))
        monkeypatch.undo()
    assert [delay_s for delay_s in slept if delay_s] == [10.0, 2.0]
