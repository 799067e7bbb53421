"""What operators can do with a simulated engine."""

from __future__ import annotations

import asyncio
import json
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from millstream_server.control.adapters import LoraAdapter
from millstream_server.control.memory import MemoryTag
from millstream_server.control.pause import PauseMode
from millstream_server.control.profile import ProfileActivity
from millstream_server.control.weights import (
    BroadcastWeights,
    DiskWeights,
    IpcWeights,
    NamedTensor,
    TensorWeights,
    WeightSource,
)
from millstream_server.engines.base import Role
from millstream_server.engines.load_progress import LoadStage
from millstream_server.engines.simulated.engine import SimulatedEngine
from millstream_server.engines.simulated.shifts import adapter_shift, version_shift
from millstream_server.generation.output import CollectingSink
from millstream_server.generation.request import GenerationRequest
from millstream_server.kv_cache.events import CacheCleared
from millstream_server.media.tensor import ElementType, TensorSpec
from millstream_server.runtime.errors import (
    AdapterNotFoundError,
    EngineBusyError,
    InternalError,
    InvalidWeightsError,
    KvTransferError,
    UnsupportedFeatureError,
    WorkerPausedError,
)
from millstream_server.transfer.ticket import Ticket
from tests.support.simulated_engine import CONFIG, asked, finished, running, stored
from tests.support.waiting import until

STEPPING = replace(CONFIG, step_s=0.001)
TENSOR = NamedTensor("simulated.weight", TensorSpec(ElementType.FLOAT32, (1,)))


def submitted(engine: SimulatedEngine, request: GenerationRequest) -> CollectingSink:
    sink = CollectingSink()
    engine.submit(request, sink)
    return sink


async def until_started(*sinks: CollectingSink) -> None:
    await until(lambda: all(sink.token_ids for sink in sinks))


def controls(engine: SimulatedEngine) -> Any:
    """Return the controls, of which none is missing."""
    return engine.controls


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
    slept: list[float] = []
    sleep = asyncio.sleep

    async def count(delay_s: float) -> None:
        slept.append(delay_s)
        await sleep(0)

    async with running(replace(CONFIG, prefill_s_per_token=1.0)) as (engine, followed):
        monkeypatch.setattr(asyncio, "sleep", count)
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


# ---- weights


def checkpoint(directory: Path, *, vocab_size: int = CONFIG.vocab_size) -> Path:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({"vocab_size": vocab_size}))
    header = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    (directory / "a.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    return directory


async def test_new_weights_show_in_every_token_and_empty_the_cache(tmp_path: Path) -> None:
    good = checkpoint(tmp_path / "good")
    async with running(CONFIG) as (engine, followed):
        first = await finished(engine, asked(range(9), 2))
        weights, told = controls(engine).weights, []
        await weights.check_weights(DiskWeights(good), lambda *done: told.append(done))
        size = (good / "a.safetensors").stat().st_size
        assert told == [(size, size)]
        await weights.update_weights(DiskWeights(good), "two")
        assert followed.told[-1] == (0, CacheCleared())
        sink = submitted(engine, asked(range(9), 2))
        second = await sink.result()
        step = 1 + version_shift("two")
        assert sink.token_ids == [8 + step, 8 + 2 * step]
        assert (first.weight_version, second.weight_version) == ("", "two")
        assert second.cached_tokens == 0
        await weights.update_weights(TensorWeights([(TENSOR, b"1234")]), "")
        back = submitted(engine, asked(range(9), 2))
        assert (await back.result()).weight_version == ""
        assert back.token_ids == [9, 10]


def test_shifts_by_hand() -> None:
    assert (version_shift(""), version_shift("v1", "v1"), adapter_shift("")) == (0, 0, 0)
    assert (version_shift("v1"), version_shift("v2"), adapter_shift("poet")) == (79, 32, 23)


def _spoil(directory: Path, how: str) -> None:
    weights = directory / "a.safetensors"
    match how:
        case "no directory":
            weights.unlink()
            (directory / "config.json").unlink()
            directory.rmdir()
        case "no config":
            (directory / "config.json").unlink()
        case "no files":
            weights.unlink()
        case "cut off":
            weights.write_bytes(weights.read_bytes()[:-1])
        case "another vocabulary":
            (directory / "config.json").write_text('{"text_config": {"vocab_size": 7}}')
        case "no json":
            (directory / "config.json").write_text("{")
        case "missing file":
            index = {"weight_map": {"w": "a.safetensors", "v": "b.safetensors"}}
            (directory / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ("no directory", "no such directory"),
        ("no config", "has no config.json"),
        ("no files", r"no \*.safetensors"),
        ("cut off", "^a.safetensors is cut off"),
        ("another vocabulary", "a vocabulary of 7 tokens, the engine's has 1000"),
        ("no json", "config.json can't be read"),
        ("missing file", "1 of the 2 files that .* are missing: b.safetensors"),
    ],
)
async def test_a_broken_checkpoint_leaves_the_old_one(
    tmp_path: Path, how: str, sentence: str
) -> None:
    directory = checkpoint(tmp_path / "it")
    _spoil(directory, how)
    async with running(CONFIG) as (engine, _):
        for attempt in (
            controls(engine).weights.check_weights(DiskWeights(directory), lambda *_: None),
            controls(engine).weights.update_weights(DiskWeights(directory), "two"),
        ):
            with pytest.raises(InvalidWeightsError, match=sentence) as caught:
                await attempt
            assert str(tmp_path) not in caught.value.message
        assert (await finished(engine, asked([1]))).weight_version == ""


@pytest.mark.parametrize(
    ("source", "error", "sentence"),
    [
        (TensorWeights([]), InvalidWeightsError, "no tensor"),
        (
            TensorWeights([(NamedTensor("other", TENSOR.spec), b"1234")]),
            InvalidWeightsError,
            "no tensor 'other'",
        ),
        (
            TensorWeights(
                [
                    (
                        NamedTensor(TENSOR.name, TensorSpec(TENSOR.spec.element_type, (2,))),
                        b"12345678",
                    )
                ]
            ),
            InvalidWeightsError,
            r"the shape \[2\]",
        ),
        (TensorWeights([(TENSOR, b"123")]), InvalidWeightsError, "has 3 bytes"),
        (IpcWeights({}), UnsupportedFeatureError, "from disk or in the call"),
        (
            BroadcastWeights(
                master_address="h:1",
                rank_offset=1,
                world_size=2,
                group_name="g",
                backend="gloo",
                tensors=[TENSOR],
            ),
            UnsupportedFeatureError,
            "from disk or in the call",
        ),
    ],
)
async def test_other_sources_are_refused(
    source: WeightSource, error: type[Exception], sentence: str
) -> None:
    async with running(CONFIG) as (engine, _):
        with pytest.raises(error, match=sentence):
            await controls(engine).weights.check_weights(source, lambda *_: None)


# ---- adapters


def adapter_at(directory: Path, config: object) -> Path:
    directory.mkdir()
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


async def test_an_adapter_shows_in_every_token_and_has_its_own_cache(tmp_path: Path) -> None:
    path = adapter_at(tmp_path / "poet", {"r": 8})
    async with running(CONFIG) as (engine, followed):
        adapters = controls(engine).adapters
        assert await adapters.load_adapter("poet", path) == LoraAdapter("poet", 8, path)
        await finished(engine, asked(range(8)))
        sink = submitted(engine, asked(range(8), 2, adapter="poet"))
        assert (await sink.result()).cached_tokens == 0
        step = 1 + adapter_shift("poet")
        assert sink.token_ids == [7 + step, 7 + 2 * step]
        assert followed.told[-1] == (0, stored(range(8), adapter="poet"))
        await adapters.unload_adapter("poet")
        await adapters.load_adapter("poet", path)
        again = await finished(engine, asked(range(8), adapter="poet"))
        assert again.cached_tokens == 0, "the name may stand for other weights now"


async def test_unloading_waits_for_requests_and_lets_no_new_ones_in(tmp_path: Path) -> None:
    async with running(STEPPING) as (engine, _):
        adapters = controls(engine).adapters
        await adapters.load_adapter("poet", adapter_at(tmp_path / "poet", {"r": 8}))
        requests = [asked(range(9), 100, adapter="poet") for _ in range(2)]
        for request in requests:
            submitted(engine, request)
        unloading = asyncio.ensure_future(adapters.unload_adapter("poet"))
        await asyncio.sleep(0)
        with pytest.raises(AdapterNotFoundError, match="'poet' isn't loaded"):
            await finished(engine, asked([1], adapter="poet"))
        for request in requests:
            assert not unloading.done()
            engine.abort(request.engine_id)
            await asyncio.sleep(0)
        await asyncio.wait_for(unloading, 5)


@pytest.mark.parametrize(
    ("config", "sentence"),
    [({}, "not None"), ({"r": 0}, "not 0"), ({"r": True}, "not True"), ([], "no JSON object")],
)
async def test_a_directory_without_an_adapter_is_refused(
    tmp_path: Path, config: object, sentence: str
) -> None:
    async with running(CONFIG) as (engine, _):
        adapters = controls(engine).adapters
        with pytest.raises(InvalidWeightsError, match=sentence):
            await adapters.load_adapter("poet", adapter_at(tmp_path / "it", config))
        with pytest.raises(InvalidWeightsError, match="no such directory"):
            await adapters.load_adapter("poet", tmp_path / "other")
        cut = adapter_at(tmp_path / "cut", {"r": 4})
        (cut / "adapter_model.safetensors").write_bytes(b"\x09")
        with pytest.raises(InvalidWeightsError, match=r"^adapter_model\.safetensors isn't"):
            await adapters.load_adapter("poet", cut)
        with pytest.raises(AdapterNotFoundError):
            await finished(engine, asked([1], adapter="poet"))


async def test_a_pair_with_different_weights_is_noticed() -> None:
    prefill = SimulatedEngine(replace(CONFIG, role=Role.PREFILL))
    info = await prefill.start(lambda _: None)
    try:
        await controls(prefill).weights.update_weights(TensorWeights([(TENSOR, b"1234")]), "two")
        async with running(replace(CONFIG, role=Role.DECODE)) as (decode, _):
            ticket = Ticket(info.bootstrap_host, info.bootstrap_port, 5)
            submitted(prefill, asked([1, 2], ticket=ticket))
            with pytest.raises(KvTransferError, match="different weights or adapters"):
                await finished(decode, asked([1, 2], ticket=ticket))
    finally:
        await prefill.close()


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
