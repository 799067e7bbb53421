"""One engine that runs whole requests: every knob, operations, KV events, and its death."""

from __future__ import annotations

import asyncio
import math
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio

from millstream_server.control.operations import (
    DiskWeights,
    PauseMode,
    ProfileActivity,
    TensorWeights,
)
from millstream_server.engines.vllm.config import VllmEngineConfig
from millstream_server.engines.vllm.engine import VllmEngine
from millstream_server.generation.output import CollectingSink, FinishReason
from millstream_server.generation.request import LogprobOptions
from millstream_server.generation.sampling import Ability, Constraint, ConstraintKind
from millstream_server.kv_cache.hashing import Namespace, block_hashes
from millstream_server.runtime.errors import (
    AdapterNotFoundError,
    EngineBusyError,
    EngineFailedError,
    InvalidRequestError,
    InvalidWeightsError,
    UnsupportedFeatureError,
    WorkerPausedError,
)
from millstream_server.runtime.priority import Priority
from millstream_testing.waiting import until
from tests.support.engines.vllm_engines import (
    LONG,
    PROMPTS,
    Started,
    generation,
    reference,
    result,
)
from tests.support.models.checkpoints import changed, make_adapter, save
from tests.support.models.models import CONTEXT_LENGTH, EOS_TOKEN_ID, VOCAB_SIZE
from tests.support.worker.kv_view import KvView

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="session")]

BLOCK = 32
TAG = (
    '{"type": "structural_tag", "format": {"type": "tag", "begin": "<f>", "content": '
    '{"type": "json_schema", "json_schema": {"enum": [1, 2]}}, "end": "</f>"}}'
)


_KV = KvView()


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def plain(model: Path) -> AsyncIterator[Started]:
    failures: list[Exception] = []
    engine = VllmEngine(
        VllmEngineConfig(
            model_path=str(model), max_running_requests=4, max_loras_per_batch=2, max_lora_rank=8
        )
    )
    engine.follow_kv(_KV)
    try:
        info = await engine.start(failures.append)
        await engine.warm_up()
        yield Started(engine, info, failures)  # type: ignore[arg-type]
    finally:
        await engine.close()


async def test_info(plain: Started) -> None:
    info = plain.info
    assert info.engine == "vllm"
    assert info.engine_version.startswith("0.32")
    assert (info.vocab_size, info.context_length) == (VOCAB_SIZE, CONTEXT_LENGTH)
    assert (info.block_size, info.total_blocks) == (BLOCK, 8192 // BLOCK)
    assert info.max_running_requests == 4
    assert info.abilities == frozenset(Ability) - {Ability.RESUMED_OUTPUT}
    assert info.kv_transfer is None
    assert info.tells_kv


# ---- generation


async def test_greedy_equals_transformers(plain: Started, expected: list[list[int]]) -> None:
    sinks = await asyncio.gather(*(plain.answer(generation(ids)) for ids in PROMPTS))
    assert [sink.token_ids for sink in sinks] == expected


async def test_usage(plain: Started) -> None:
    ids = [*range(500, 570)]
    first = await result(plain.submit(generation(ids, ignore_eos=True)))
    again = await result(plain.submit(generation(ids, ignore_eos=True)))
    assert (first.prompt_tokens, first.completion_tokens) == (70, 12)
    assert first.reason is FinishReason.LENGTH
    assert (first.cached_tokens, again.cached_tokens) == (0, 64)


async def test_eos_ends_it_and_is_the_last(plain: Started) -> None:
    bias = {EOS_TOKEN_ID: 100.0}
    sink = await plain.answer(generation(PROMPTS[3], logit_bias=bias))
    finish = await sink.result()
    assert (finish.reason, finish.matched_token_id) == (FinishReason.STOP, EOS_TOKEN_ID)
    assert sink.token_ids == [EOS_TOKEN_ID]
    sink = await plain.answer(generation(PROMPTS[3], 4, logit_bias=bias, ignore_eos=True))
    assert sink.token_ids == [EOS_TOKEN_ID] * 4
    sink = await plain.answer(generation(PROMPTS[3], 6, logit_bias=bias, min_new_tokens=3))
    assert sink.token_ids.index(EOS_TOKEN_ID) == 3


async def test_stop_tokens_work_beside_ignore_eos(plain: Started) -> None:
    whole = (await plain.answer(generation(PROMPTS[5], ignore_eos=True))).token_ids
    sink = await plain.answer(generation(PROMPTS[5], ignore_eos=True, stop_token_ids=(whole[4],)))
    finish = await sink.result()
    assert (finish.reason, finish.matched_token_id) == (FinishReason.STOP, whole[4])
    assert sink.token_ids == whole[: whole.index(whole[4]) + 1]


@pytest.mark.parametrize("seed", [1, -1, -5, 2**63 - 1, -(2**63)])
async def test_a_seed_repeats_also_in_a_batch(plain: Started, seed: int) -> None:
    def drawn() -> CollectingSink:
        return plain.submit(generation(PROMPTS[6], temperature=1.0, seed=seed, ignore_eos=True))

    alone = drawn()
    await result(alone)
    batch = [drawn() for _ in range(4)]
    for sink in batch:
        await result(sink)
    assert all(sink.token_ids == alone.token_ids for sink in batch)


async def test_a_seed_repeats_for_prompts_that_are_computed_in_parts(plain: Started) -> None:
    """On a CPU vLLM itself ends: its generators there have no offset to be turned back by."""
    prompts = [[(17 * n + 3 * i) % 900 + 50 for i in range(LONG)] for n in range(6)]
    assert plain.info.max_batched_tokens < len(prompts) * LONG

    def drawn(ids: list[int]) -> CollectingSink:
        return plain.submit(generation(ids, temperature=1.0, seed=3, ignore_eos=True))

    together = [drawn(ids) for ids in prompts]
    for sink in together:
        await result(sink)
    for ids, sink in zip(prompts, together, strict=True):
        alone = drawn(ids)
        await result(alone)
        assert alone.token_ids == sink.token_ids


async def test_without_a_seed_answers_differ(plain: Started) -> None:
    def drawn() -> CollectingSink:
        return plain.submit(generation(PROMPTS[6], temperature=1.5, ignore_eos=True))

    sinks = [drawn() for _ in range(4)]
    for sink in sinks:
        await result(sink)
    assert len({tuple(sink.token_ids) for sink in sinks}) > 1


@pytest.mark.parametrize(
    "knobs",
    [
        {"frequency_penalty": 1.9},
        {"presence_penalty": 1.9},
        {"repetition_penalty": 1.9},
        {"logit_bias": {7: 100.0}},
    ],
)
async def test_a_knob_has_its_effect(plain: Started, knobs: dict[str, object]) -> None:
    ids = [5] * 60
    neutral = await plain.answer(generation(ids, 30, ignore_eos=True))
    sink = await plain.answer(generation(ids, 30, ignore_eos=True, **knobs))
    assert sink.token_ids != neutral.token_ids


async def test_the_narrowest_draws_are_greedy(plain: Started) -> None:
    greedy = await plain.answer(generation(PROMPTS[7], ignore_eos=True))
    for knobs in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}):
        sink = await plain.answer(generation(PROMPTS[7], temperature=1.0, ignore_eos=True, **knobs))
        assert sink.token_ids == greedy.token_ids, knobs
    wide = generation(PROMPTS[7], 2, temperature=1.0, top_k=2**40, ignore_eos=True)
    assert len((await plain.answer(wide)).token_ids) == 2


async def test_logprobs_of_the_prompt(plain: Started) -> None:
    request = generation(
        PROMPTS[7], 2, ignore_eos=True, logprobs=LogprobOptions(top=2, prompt=True)
    )
    sink = await plain.answer(request)
    finish = await sink.result()
    assert [entry.token_id for entry in finish.prompt_logprobs] == PROMPTS[7]
    first, *others = finish.prompt_logprobs
    assert math.isnan(first.logprob)
    assert all(entry.logprob <= 0 and len(entry.top) == 2 for entry in others)
    assert finish.cached_tokens == 0


async def test_salts_share_no_cache(plain: Started) -> None:
    ids = [*range(600, 670)]
    for salt, cached in (("a", 0), ("a", 64), ("b", 0), ("", 0)):
        finish = await result(plain.submit(generation(ids, 1, cache_salt=salt)))
        assert finish.cached_tokens == cached, salt


@pytest.mark.parametrize(
    ("kind", "source", "most"),
    [
        (ConstraintKind.REGEX, "[ab]{3}", 4),
        (ConstraintKind.EBNF, 'root ::= "x" | "y"', 2),
        (ConstraintKind.JSON_SCHEMA, '{"type":"array","items":{"type":"null"},"maxItems":1}', 40),
        (ConstraintKind.STRUCTURAL_TAG, TAG, 12),
    ],
)
async def test_a_constraint_ends_the_answer(
    plain: Started, kind: ConstraintKind, source: str, most: int
) -> None:
    sink = await plain.answer(generation(PROMPTS[4], 60, constraint=Constraint(kind, source)))
    finish = await sink.result()
    assert finish.reason is FinishReason.STOP
    assert finish.completion_tokens <= most


async def test_a_grammar_that_cannot_be_compiled(plain: Started) -> None:
    for kind, source in (
        (ConstraintKind.REGEX, "(("),
        (ConstraintKind.EBNF, "nothing"),
        (ConstraintKind.STRUCTURAL_TAG, TAG.replace('{"enum": [1, 2]}', '{"type": "odd"}')),
    ):
        with pytest.raises(InvalidRequestError, match=r"sampling\.constraint"):
            await result(
                plain.submit(generation(PROMPTS[4], 6, constraint=Constraint(kind, source)))
            )


async def test_what_vllm_does_not_take(plain: Started) -> None:
    tried: list[dict[str, Any]] = [{"temperature": 2.5}, {"repetition_penalty": 1e-9}]
    for knobs in tried:
        with pytest.raises(UnsupportedFeatureError, match=next(iter(knobs))):
            await result(plain.submit(generation(PROMPTS[4], **knobs)))


async def test_a_high_priority_overtakes(plain: Started) -> None:
    order: list[str] = []

    async def one(name: str, priority: Priority) -> None:
        ids = [(hash(name) % 700) + 50] * 200
        await result(plain.submit(generation(ids, 12, ignore_eos=True, priority=priority)))
        order.append(name)

    names = [(f"n{i}", Priority.NORMAL) for i in range(16)]
    await asyncio.gather(
        *(one(*each) for each in [*names, ("low", Priority.LOW), ("high", Priority.HIGH)])
    )
    assert order.index("high") < 8
    assert order[-1] == "low"


async def test_a_long_prompt_is_answered_and_counted(plain: Started) -> None:
    request = generation([9] * 2000, 40, ignore_eos=True)
    assert (await result(plain.submit(request))).completion_tokens == 40


# ---- operations


async def _idle(plain: Started) -> None:
    async def idle() -> bool:
        load = await plain.engine.load()
        return not (load.running_requests or load.queued_requests or load.used_blocks)

    await until(idle)


async def test_a_pause_in_place_keeps_requests(plain: Started) -> None:
    pause = plain.engine.controls.pause
    assert pause is not None
    sink = plain.submit(generation(PROMPTS[8], 300, ignore_eos=True))
    await sink.first_token()
    await pause.pause(PauseMode.IN_PLACE)
    stood = len(sink.token_ids)
    late = plain.submit(generation(PROMPTS[9], 3, ignore_eos=True))
    gone = generation(PROMPTS[10], 3)
    assert (await plain.abort(gone, plain.submit(gone))).reason is FinishReason.CANCELLED
    await asyncio.sleep(0.3)
    assert len(sink.token_ids) <= stood + 1
    assert not late.token_ids
    await pause.go_on()
    assert (await result(sink)).completion_tokens == 300
    assert (await result(late)).completion_tokens == 3


async def test_a_pause_can_end_requests(plain: Started) -> None:
    pause = plain.engine.controls.pause
    assert pause is not None
    sink = plain.submit(generation(PROMPTS[8], LONG, ignore_eos=True))
    await sink.first_token()
    await pause.pause(PauseMode.ABORT)
    with pytest.raises(WorkerPausedError):
        await result(sink)
    late = plain.submit(generation(PROMPTS[9], 3, ignore_eos=True))
    await pause.go_on()
    assert (await result(late)).completion_tokens == 3
    with pytest.raises(UnsupportedFeatureError, match="RETRACT"):
        await pause.pause(PauseMode.RETRACT)
    await _idle(plain)


async def test_a_flush_empties_the_prefix_cache(plain: Started) -> None:
    cache = plain.engine.controls.cache
    assert cache is not None
    ids = [*range(100, 170)]
    await result(plain.submit(generation(ids, 2)))
    request = generation(PROMPTS[8], LONG, ignore_eos=True)
    sink = plain.submit(request)
    with pytest.raises(EngineBusyError):
        await cache.flush_cache()
    await plain.abort(request, sink)
    await cache.flush_cache()
    assert (await result(plain.submit(generation(ids, 2)))).cached_tokens == 0


async def test_weights_from_disk(plain: Started, model: Path, tmp_path: Path) -> None:
    weights = plain.engine.controls.weights
    assert weights is not None
    other = save(model, tmp_path / "other", changed(model, 5))
    before = await plain.answer(generation(PROMPTS[8]))
    await weights.check_weights(DiskWeights(other), lambda *_: None)
    await weights.update_weights(DiskWeights(other), "v2")
    after = await plain.answer(generation(PROMPTS[8]))
    assert after.token_ids != before.token_ids
    assert (await after.result()).weight_version == "v2"
    (wanted,) = await reference(other, [PROMPTS[8]], 12)
    assert after.token_ids == wanted
    for wrong in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(InvalidWeightsError):
            await weights.check_weights(DiskWeights(wrong), lambda *_: None)
        with pytest.raises(InvalidWeightsError):
            await weights.update_weights(DiskWeights(wrong), "v3")
    with pytest.raises(UnsupportedFeatureError, match="from disk only"):
        await weights.check_weights(TensorWeights(()), lambda *_: None)
    await weights.update_weights(DiskWeights(model), "v1")
    again = await plain.answer(generation(PROMPTS[8]))
    assert again.token_ids == before.token_ids


async def test_an_adapter_comes_and_goes(plain: Started, model: Path, tmp_path: Path) -> None:
    adapters = plain.engine.controls.adapters
    assert adapters is not None
    base = await plain.answer(generation(PROMPTS[11], ignore_eos=True))
    path, merged = make_adapter(model, tmp_path / "ada", seed=1)
    loaded = await adapters.load_adapter("ada", path)
    assert (loaded.name, loaded.rank) == ("ada", 4)
    with_it = await plain.answer(generation(PROMPTS[11], ignore_eos=True, adapter="ada"))
    assert with_it.token_ids != base.token_ids
    assert (
        await plain.answer(generation(PROMPTS[11], ignore_eos=True))
    ).token_ids == base.token_ids
    wanted = set(block_hashes(PROMPTS[11], BLOCK, Namespace("ada")))
    await until(lambda: wanted <= _KV.ranks[0])
    for wrong in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(InvalidWeightsError):
            await adapters.load_adapter("bad", wrong)
    await adapters.unload_adapter("ada")
    assert not wanted & _KV.ranks[0]
    with pytest.raises(AdapterNotFoundError):
        await plain.answer(generation(PROMPTS[11], adapter="ada"))
    (answer,) = await reference(save(model, tmp_path / "merged", merged), [PROMPTS[11]], 12)
    assert with_it.token_ids[: len(answer)] == answer
    other, _ = make_adapter(model, tmp_path / "other", seed=2)
    await adapters.load_adapter("ada", other)
    second = await plain.answer(generation(PROMPTS[11], ignore_eos=True, adapter="ada"))
    assert second.token_ids != with_it.token_ids
    await adapters.unload_adapter("ada")


async def test_a_profile_is_recorded(plain: Started, tmp_path: Path) -> None:
    profile = plain.engine.controls.profile
    assert profile is not None
    with pytest.raises(UnsupportedFeatureError, match="gpu"):
        await profile.start_profile(tmp_path, [ProfileActivity.GPU], 0)
    await profile.start_profile(tmp_path, [], 0)
    await result(plain.submit(generation(PROMPTS[8], 4)))
    await profile.stop_profile()
    assert await asyncio.to_thread(os.listdir, tmp_path)


async def test_no_memory_is_released_on_a_cpu(plain: Started) -> None:
    assert plain.engine.controls.memory is None


async def test_events_name_blocks_as_a_router_does(plain: Started) -> None:
    ids = [*range(700, 800)]
    await result(plain.submit(generation(ids, 1)))
    await result(plain.submit(generation(ids, 1, cache_salt="s")))
    wanted = {*block_hashes(ids, BLOCK), *block_hashes(ids, BLOCK, Namespace(salt="s"))}
    assert len(wanted) == 6
    await until(lambda: wanted <= _KV.ranks[0])
    cleared = _KV.cleared
    assert plain.engine.controls.cache is not None
    await plain.engine.controls.cache.flush_cache()
    await until(lambda: _KV.cleared > cleared and not wanted & _KV.ranks[0])


# ---- the last test: it takes the engine


async def test_the_death_of_vllm_ends_every_request_once(plain: Started) -> None:
    sinks = [plain.submit(generation(PROMPTS[8], LONG, ignore_eos=True)) for _ in range(6)]
    await sinks[0].first_token()
    built, _ = plain.engine._lifetime.ready()
    pids = built.pids()
    os.kill(pids[0], signal.SIGKILL)
    for sink in sinks:
        with pytest.raises(EngineFailedError):
            await result(sink)
    assert len(plain.failures) == 1
    with pytest.raises(EngineFailedError):
        await result(plain.submit(generation(PROMPTS[8])))
    with pytest.raises(EngineFailedError):
        await plain.engine.load()
    await plain.engine.close()
    assert not [pid for pid in pids if psutil.pid_exists(pid)]
