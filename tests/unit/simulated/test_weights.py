"""New weights and LoRA adapters in a simulated engine: what fits, and what shows in the tokens."""

from __future__ import annotations

import asyncio
import json
import struct
from dataclasses import replace
from pathlib import Path

import pytest

from millstream_server.control.engine import Role
from millstream_server.control.operations import (
    BroadcastWeights,
    DiskWeights,
    IpcWeights,
    LoraAdapter,
    NamedTensor,
    TensorWeights,
    WeightSource,
)
from millstream_server.engines.simulated.engine import SimulatedEngine
from millstream_server.engines.simulated.state import adapter_shift, version_shift
from millstream_server.generation.ticket import Ticket
from millstream_server.kv_cache.events import CacheCleared
from millstream_server.media.tensor import TensorSpec
from millstream_server.runtime.errors import (
    AdapterNotFoundError,
    InvalidWeightsError,
    KvTransferError,
    UnsupportedFeatureError,
)
from tests.support.worker.simulated_engine import (
    CONFIG,
    TENSOR,
    asked,
    controls,
    finished,
    running,
    stored,
    submitted,
)

STEPPING = replace(CONFIG, step_s=0.001)


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
