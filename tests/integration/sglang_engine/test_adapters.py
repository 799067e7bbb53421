"""LoRA adapters on the real engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from millstream_server.control.operations import DiskWeights
from millstream_server.engines.sglang.config import LORA_MODULES
from millstream_server.kv_cache.hashing import Namespace, block_hashes
from millstream_server.runtime.errors import AdapterNotFoundError, InvalidWeightsError
from tests.support.engines.bare_sglang import NEW_TOKENS
from tests.support.engines.engine_process import EngineProcess
from tests.support.engines.sglang_requests import (
    LONG,
    PROMPTS,
    answer,
    child,
    generation,
    prompt,
    released,
    result,
)
from tests.support.models.checkpoints import changed, make_adapter, save

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.asyncio(loop_scope="session"),
    # An engine takes 10 s to start on a quiet machine and over a minute on a busy one.
    pytest.mark.timeout(420),
]

_ASKED = PROMPTS[:3]


@dataclass(frozen=True)
class Adapters:
    """Two adapters, another model, and what transformers answers with all merged."""

    a: Path
    b: Path
    other_model: Path
    answers: dict[str, list[list[int]]]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def adapters(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Adapters:
    folder = tmp_path_factory.mktemp("adapters")
    other = save(model, folder / "other", changed(model, 1))
    a, with_a = make_adapter(model, folder / "a", seed=3)
    b, with_b = make_adapter(model, folder / "b", seed=4, rank=16, modules=LORA_MODULES)
    _, other_with_a = make_adapter(other, folder / "unused", seed=3)
    merged = {
        "": model,
        "a": save(model, folder / "with-a", with_a),
        "b": save(model, folder / "with-b", with_b),
        "other+a": save(model, folder / "other-with-a", other_with_a),
    }
    found = await child(
        "tests.support.engines.reference_llama",
        str(NEW_TOKENS),
        json.dumps(_ASKED),
        *map(str, merged.values()),
    )
    assert len({str(answers) for answers in found}) == len(merged)
    return Adapters(a, b, other, dict(zip(merged, found, strict=True)))


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def engine(
    model: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[EngineProcess]:
    engine = await EngineProcess.launch(
        tmp_path_factory.mktemp("adapters") / "log", model_path=str(model), max_loras_per_batch=2
    )
    assert (await engine.ready()).takes_adapters
    yield engine
    assert await engine.close() == 0


async def _answers(engine: EngineProcess, adapter: str) -> list[list[int]]:
    asked = [replace(generation(ids), adapter=adapter) for ids in _ASKED]
    return [(await answer(engine, each)).token_ids for each in asked]


async def test_answers_are_those_of_the_merged_model(
    engine: EngineProcess, adapters: Adapters
) -> None:
    for name, path in (("a", adapters.a), ("b", adapters.b)):
        loaded = await engine.control("adapters", "load_adapter", name, path)
        assert (loaded.name, loaded.path) == (name, path)
        assert loaded.rank == {"a": 4, "b": 16}[name]
    for name in ("", "a", "b"):
        for _ in range(2):  # the second time from the prefix cache
            assert await _answers(engine, name) == adapters.answers[name]
    mixed = [
        (name, index, engine.submit(replace(generation(ids), adapter=name)))
        for name in ("", "a", "b")
        for index, ids in enumerate(_ASKED)
    ]
    for name, index, sink in mixed:
        await result(sink)
        assert sink.token_ids == adapters.answers[name][index]
    for name in ("a", "b"):
        await engine.control("adapters", "unload_adapter", name)


async def test_a_removed_adapter_isnt_loaded_again_by_itself(
    engine: EngineProcess, adapters: Adapters
) -> None:
    with pytest.raises(AdapterNotFoundError, match="'x'"):
        await _answers(engine, "x")
    await engine.control("adapters", "load_adapter", "x", adapters.a)
    assert await _answers(engine, "x") == adapters.answers["a"]
    await engine.control("adapters", "unload_adapter", "x")
    with pytest.raises(AdapterNotFoundError):
        await _answers(engine, "x")
    # Another one of that name has nothing of its prefix cache.
    await engine.control("adapters", "load_adapter", "x", adapters.b)
    assert await _answers(engine, "x") == adapters.answers["b"]
    await engine.control("adapters", "unload_adapter", "x")


async def test_a_removal_waits_for_requests(engine: EngineProcess, adapters: Adapters) -> None:
    await engine.control("adapters", "load_adapter", "a", adapters.a)
    request = replace(generation(prompt(40), LONG, ignore_eos=True), adapter="a")
    running = engine.submit(request)
    await running.first_token()
    removal = asyncio.create_task(engine.control("adapters", "unload_adapter", "a"))
    await asyncio.sleep(0)
    with pytest.raises(AdapterNotFoundError):
        await _answers(engine, "a")
    assert await _answers(engine, "") == adapters.answers[""]
    assert not removal.done()
    engine.abort(request.engine_id)
    await result(running)
    await removal
    await released(engine)


async def test_what_the_engine_would_die_of_is_refused(
    engine: EngineProcess, model: Path, tmp_path: Path, adapters: Adapters
) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"rank": 17}, "rank 17"),
        ({"modules": ("k_proj",)}, "but not 'q_proj'"),
        ({"modules": ("lm_head",)}, "lm_head"),
        ({"r": 8}, "shape"),
    ]
    for number, (changes, why) in enumerate(cases):
        path, _ = make_adapter(model, tmp_path / str(number), seed=1, **changes)
        with pytest.raises(InvalidWeightsError, match=why):
            await engine.control("adapters", "load_adapter", "bad", path)
    assert await _answers(engine, "") == adapters.answers[""]


async def test_new_weights_and_an_adapter_go_together(
    engine: EngineProcess, model: Path, adapters: Adapters
) -> None:
    await engine.control("adapters", "load_adapter", "a", adapters.a)
    await engine.control("weights", "update_weights", DiskWeights(adapters.other_model), "other")
    assert await _answers(engine, "a") == adapters.answers["other+a"]
    await engine.control("weights", "update_weights", DiskWeights(model), "base")
    assert await _answers(engine, "a") == adapters.answers["a"]


async def test_an_adapters_blocks_are_told_with_hashes_of_its_name(
    engine: EngineProcess, adapters: Adapters
) -> None:
    await engine.control("adapters", "load_adapter", "poet", adapters.a)
    told: set[int] = set()
    for salt in ("", "s"):
        for length in (20, 30):  # the second continues the first
            ids = prompt(length)
            sink = await answer(engine, replace(generation(ids, cache_salt=salt), adapter="poet"))
            full = [*ids, *sink.token_ids][:-1]
            told.update(block_hashes(full, 1, Namespace("poet", salt)))
    async with asyncio.timeout(10):
        while not told <= engine.kv.ranks[0]:
            await asyncio.sleep(0.005)
    assert {engine.kv.adapters.get(each) for each in told} == {"poet"}
    await engine.control("adapters", "unload_adapter", "poet")
