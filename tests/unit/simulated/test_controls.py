"""What operators can do with a simulated engine."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest

from millstream_server.control.engine import LoadStage, Role
from millstream_server.control.operations import (
    MemoryTag,
    PauseMode,
    ProfileActivity,
    TensorWeights,
)
from millstream_server.engines.simulated.engine import SimulatedEngine
from millstream_server.generation.output import CollectingSink
from millstream_server.kv_cache.events import CacheCleared
from millstream_server.runtime.errors import (
    EngineBusyError,
    InternalError,
    StorageError,
    UnsupportedFeatureError,
    WorkerPausedError,
)
from millstream_testing.waiting import until
from tests.support.worker.simulated_engine import (
    CONFIG,
    TENSOR,
    asked,
    controls,
    finished,
    running,
    stored,
    submitted,
    without_sleeping,
)

STEPPING = replace(CONFIG, step_s=0.001)


async def until_started(*sinks: CollectingSink) -> None:
    await until(lambda: all(sink.token_ids for sink in sinks))


# ---- memory and cache


async def test_released_memory_drops_the_cache_and_refuses_requests() -> None:
    async with running(CONFIG) as (engine, followed):
        memory = controls(engine).memory
        before = await finished(engine, asked(range(9), 5))
        await memory.release_memory({MemoryTag.KV_CACHE, MemoryTag.WEIGHTS})
        assert followed.told[-1] == (0, CacheCleared())
        await memory.resume_memory({MemoryTag.KV_CACHE})
        with pytest.raises(InternalError, match="released: weights"):
            await engine.probe(0)
        await memory.resume_memory({MemoryTag.WEIGHTS})
        after = await finished(engine, asked(range(9), 5))
        assert after == before, "nothing was cached"


async def test_memory_is_measured_not_assumed() -> None:
    async with running(CONFIG) as (engine, _):
        memory = controls(engine).memory
        before = await memory.memory_use()
        held = bytearray(64 << 20)
        held[:: 1 << 12] = b"x" * (len(held) >> 12)
        grown = (await memory.memory_use()).host_bytes - before.host_bytes
    assert 32 << 20 < grown < 128 << 20
    assert before.device_bytes == 0


async def test_cache_and_memory_need_an_idle_engine() -> None:
    async with running(STEPPING) as (engine, followed):
        request = asked(range(9), 100)
        sink = submitted(engine, request)
        await until_started(sink)
        with pytest.raises(EngineBusyError, match="1 requests are open"):
            await controls(engine).cache.flush_cache()
        with pytest.raises(EngineBusyError):
            await controls(engine).memory.release_memory({MemoryTag.KV_CACHE})
        with pytest.raises(EngineBusyError):
            await controls(engine).weights.update_weights(TensorWeights([(TENSOR, b"1234")]), "2")
        engine.abort(request.engine_id)
        await controls(engine).cache.flush_cache()
        assert followed.told[-1] == (0, CacheCleared())
        assert (await finished(engine, asked(range(9)))).cached_tokens == 0


# ---- pause


@pytest.mark.parametrize("mode", [PauseMode.IN_PLACE, PauseMode.RETRACT])
async def test_paused_requests_go_on_where_they_were(mode: PauseMode) -> None:
    config = replace(CONFIG, prefill_s_per_token=0.0001, total_blocks=64)
    async with running(config) as (engine, _):
        sinks = [submitted(engine, asked(range(i, i + 9), 60)) for i in (0, 100)]
        for sink in sinks:
            await sink.first_token()
        await controls(engine).pause.pause(mode)
        had = [len(sink.token_ids) for sink in sinks]
        late, gone = asked(range(9)), asked(range(9))
        waits, aborted = submitted(engine, late), submitted(engine, gone)
        engine.abort(gone.engine_id)
        assert (await aborted.result()).completion_tokens == 0
        load = await engine.load()
        kept = mode is PauseMode.IN_PLACE
        assert (load.running_requests, load.queued_requests) == ((2, 1) if kept else (0, 3))
        assert (load.used_blocks > 0) == kept
        steps = engine.progress(0)
        for _ in range(100):  # enough for as many steps
            await asyncio.sleep(0)
        assert [len(sink.token_ids) for sink in sinks] == had
        assert engine.progress(0) == steps
        await controls(engine).pause.go_on()
        for start, sink in zip((0, 100), sinks, strict=True):
            assert (await sink.result()).cached_tokens == 0
            assert sink.token_ids == list(range(start + 9, start + 69))
        assert (await waits.result()).cached_tokens == 8
        assert (await engine.load()).used_blocks == 0


async def test_a_retracted_request_computes_its_output_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running(replace(CONFIG, prefill_s_per_token=1.0)) as (engine, followed):
        slept = without_sleeping(monkeypatch)
        sink = submitted(engine, asked(range(10), 50))
        await until_started(sink)
        await controls(engine).pause.pause(PauseMode.RETRACT)
        known = 10 + len(sink.token_ids)
        await controls(engine).pause.go_on()
        await sink.result()
        monkeypatch.undo()
    assert [delay_s for delay_s in slept if delay_s >= 1.0] == [10.0, known - 8.0]
    assert sink.token_ids == list(range(10, 60))
    assert {event for _, event in followed.told if event == stored(range(8))}


async def test_a_pause_that_aborts_fails_all_and_lets_later_ones_wait() -> None:
    async with running(replace(STEPPING, max_running_requests=1)) as (engine, _):
        sinks = [submitted(engine, asked(range(9), 60)) for _ in range(3)]
        await until_started(sinks[0])
        await controls(engine).pause.pause(PauseMode.ABORT)
        later = submitted(engine, asked(range(9), 3))
        for sink in sinks:
            with pytest.raises(WorkerPausedError) as caught:
                await sink.result()
            assert caught.value.retry_delay_s == 1.0
        assert (await engine.load()).queued_requests == 1
        await controls(engine).pause.go_on()
        await later.result()


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
async def test_hand_offs_can_not_be_retracted(role: Role) -> None:
    async with running(replace(CONFIG, role=role)) as (engine, _):
        with pytest.raises(UnsupportedFeatureError, match="IN_PLACE or ABORT"):
            await controls(engine).pause.pause(PauseMode.RETRACT)
        await engine.probe(0)


# ---- profile, loading


def files_in(directory: Path) -> list[Path]:
    return list(directory.iterdir())


@pytest.mark.parametrize("steps", [0, 3])
async def test_a_profile_has_the_steps_that_ran(tmp_path: Path, steps: int) -> None:
    async with running(replace(CONFIG, dp_size=2)) as (engine, _):
        profile = controls(engine).profile
        await profile.start_profile(tmp_path, {ProfileActivity.CPU}, steps)
        await asyncio.gather(*(finished(engine, asked([1], 5, dp_rank=1)) for _ in range(2)))
        await profile.stop_profile()
        await profile.stop_profile()
        (file,) = files_in(tmp_path)
        await finished(engine, asked([1], 5))
    recorded = json.loads(file.read_text())["traceEvents"]
    assert len(recorded) == (steps or engine.progress(1))
    assert {(e["name"], e["ph"], e["tid"]) for e in recorded} == {("step", "X", 1)}
    assert recorded[0]["args"] == {"requests": 2}
    assert [e["ts"] for e in recorded] == sorted(e["ts"] for e in recorded)


async def test_a_profile_that_can_not_be_written_is_over_then(tmp_path: Path) -> None:
    async with running(CONFIG) as (engine, _):
        profile = controls(engine).profile
        await profile.start_profile(tmp_path / "gone", {ProfileActivity.CPU}, 0)
        with pytest.raises(StorageError, match="No such file"):
            await profile.stop_profile()
        await profile.stop_profile()


async def test_what_can_not_be_recorded_is_refused(tmp_path: Path) -> None:
    async with running(CONFIG) as (engine, _):
        with pytest.raises(UnsupportedFeatureError, match="cpu only, not gpu, memory"):
            await controls(engine).profile.start_profile(tmp_path, set(ProfileActivity), 0)
    assert files_in(tmp_path) == []


async def test_its_loading_can_be_watched() -> None:
    engine = SimulatedEngine(replace(CONFIG, load_s=0.02))
    seen = [engine.load_progress()]
    starting = asyncio.ensure_future(engine.start(lambda _: None))
    while not starting.done():
        if engine.load_progress() != seen[-1]:
            seen.append(engine.load_progress())
        await asyncio.sleep(0)
    await engine.close()
    assert seen[0].stage is LoadStage.STARTING
    assert engine.load_progress().stage is LoadStage.PREPARING
    loading = [one for one in seen if one.stage is LoadStage.LOADING_WEIGHTS]
    assert [one.files_done for one in loading] == list(range(10))
    assert {one.files_total for one in seen} == {10}
    assert all(one.bytes_done * 10 == one.files_done * one.bytes_total for one in seen)
