"""How a choice that has lost its worker goes on, on workers that the test plays itself."""

from __future__ import annotations

import asyncio
import gc
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from millstream_server.control.engine import Role
from millstream_server.formats.choosing import choose
from millstream_server.generation.output import FinishReason, TokenLogprob
from millstream_server.generation.request import LogprobOptions
from millstream_server.generation.sampling import Ability
from millstream_server.processor.answer import reading_of
from millstream_server.processor.redispatch_ways import Way
from millstream_server.processor.text.messages import ChatMessage, Tool
from millstream_server.processor.text.tokenizer import TextModel
from millstream_server.routing.plan import Plan, PlannedLeg
from millstream_server.routing.workers import WorkerView
from millstream_server.runtime.errors import (
    RepeatedLossError,
    ReplayDifferedError,
)
from tests.support.processor.lossy_turn import GONE, OTHER, REGEX, lossy, on
from tests.support.processor.played_turn import (
    DONE,
    PAIR,
    PREFILL,
    make_view,
)
from tests.support.processor.reading import SPOKEN, reading_model

# ---- to continue


async def test_prompt_and_tokens_are_continued_with_what_is_left_of_the_budgets(
    text_model: TextModel,
) -> None:
    it = lossy(text_model, knobs={"max_new_tokens": 7, "min_new_tokens": 2})
    it.lose([40, 41, 42])
    asked = it.asked()
    assert list(asked.token_ids) == [1, 2, 40, 41, 42]
    assert (asked.sampling.max_new_tokens, asked.sampling.min_new_tokens) == (4, 0)
    (routed,) = it.routes.asked
    assert list(routed.token_ids) == [1, 2, 40, 41, 42]
    assert (routed.avoid, routed.weights) == (("decode",), ("", "", "simulated"))
    it.sink().emit([43])
    it.sink().finish(replace(DONE, cached_tokens=5))
    await it.it.client.end()
    usage = it.it.turn.usage()
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (2, 4, 2)
    assert it.ids == [40, 41, 42, 43]
    assert it.ways == [(3, Way.CONTINUE)]
    assert it.it.turn.workers == ("other",)
    assert it.it.admission.left == 1
    (end,) = it.it.client.messages[-1].finished.redispatches
    assert (end.index, end.token_count) == (0, 3)


async def test_an_engine_that_can_is_told_what_was_output(text_model: TextModel) -> None:
    able = make_view("decode", Role.DECODE, Ability.RESUMED_OUTPUT)
    it = lossy(text_model, on(able), knobs={"constraint": REGEX})
    it.lose([40, 41])
    assert list(it.asked().token_ids) == [1, 2, 40, 41]
    assert it.asked().resumed_tokens == 2
    assert it.asked().sampling.constraint == REGEX
    assert it.routes.asked[0].resumes
    assert it.ways == [(2, Way.CONTINUE_WITH_STATE)]
    it.it.turn.close()


async def test_a_turn_that_went_on_is_freed_at_its_end(text_model: TextModel) -> None:
    """And not by the garbage collector, as any other."""
    it = lossy(text_model)
    it.lose([40])
    sink = it.sink()
    it.it.workers.sinks.clear()
    gc.disable()
    try:
        sink.finish(DONE)
        await it.it.client.end()
        it.it.turn.close()
        it.it.client.output = None
        alive = weakref.ref(it.it.turn), weakref.ref(it.it.turn.choices[0].token_ids)
        del it, sink
        await asyncio.sleep(0)
        assert [ref() for ref in alive] == [None, None]
    finally:
        gc.enable()


async def test_what_the_lost_part_still_sends_goes_nowhere(text_model: TextModel) -> None:
    """Prefill is lost, and decode isn't."""
    pair = Plan((PlannedLeg(Role.PREFILL, PREFILL), PlannedLeg(Role.DECODE, OTHER)), ("p", "o"))
    it = lossy(text_model, PAIR, plans=[pair])
    it.it.workers.sinks["prefill"][0].fail(GONE)
    assert it.it.workers.cancels == ["decode"]
    first, second = it.it.workers.asked["prefill"]
    assert first.ticket != second.ticket == it.asked().ticket
    it.it.workers.sinks["prefill"][0].finish(DONE)  # too late
    it.sink().emit([40])
    it.it.workers.sinks["prefill"][1].fail(GONE)  # the KV cache has come
    it.sink().finish(DONE)
    await it.it.client.end()
    assert it.it.client.raised is None
    assert it.ways == [(0, Way.AGAIN)]


async def test_a_new_prefill_worker_that_is_lost_before_the_next_token_is_a_second_loss(
    text_model: TextModel,
) -> None:
    pair = Plan((PlannedLeg(Role.PREFILL, PREFILL), PlannedLeg(Role.DECODE, OTHER)), ("p", "o"))
    it = lossy(text_model, PAIR, plans=[pair])
    it.lose([40])
    it.it.workers.sinks["prefill"][1].fail(GONE)
    await it.it.client.end()
    assert isinstance(it.it.client.raised, RepeatedLossError)
    assert it.it.workers.cancels == ["prefill", "other"]


async def test_each_choice_goes_on_by_itself(text_model: TextModel) -> None:
    seeded = Plan((PlannedLeg(Role.AGGREGATED, make_view("decode", Role.DECODE, Ability.SEED)),))
    able = make_view("other", Role.DECODE, Ability.SEED)
    it = lossy(text_model, seeded, plans=[on(able)], n=2)
    first, second = it.it.workers.sinks["decode"]
    first.emit([40, 41])
    second.emit([50])
    second.fail(GONE)
    seed = it.it.turn.seed
    assert seed is not None
    assert list(it.asked().token_ids) == [1, 2, 50]
    assert it.asked().sampling.seed == seed + 1
    first.finish(DONE)
    it.sink().finish(DONE)
    await it.it.client.end()
    assert [list(choice.token_ids) for choice in it.it.turn.choices] == [[40, 41], [50]]
    assert it.it.admission.left == 1


@pytest.mark.parametrize(
    ("knobs", "tokens", "reason"),
    [
        ({"max_new_tokens": 2}, [40, 41], FinishReason.LENGTH),
        ({"stop_token_ids": (41,)}, [40, 41], FinishReason.STOP),
        ({"stop_token_ids": (41,), "max_new_tokens": 2}, [40, 41], FinishReason.STOP),
        ({"stop_token_ids": (41,), "constraint": REGEX}, [40, 41], FinishReason.STOP),
    ],
)
async def test_an_end_that_only_the_lost_worker_could_tell_is_told(
    text_model: TextModel, knobs: dict[str, Any], tokens: list[int], reason: FinishReason
) -> None:
    it = lossy(text_model, knobs=knobs)
    it.lose(tokens)
    await it.it.client.end()
    assert it.it.turn.choices[0].finish_reason is reason
    assert (it.it.client.raised, it.routes.asked) == (None, [])


async def test_a_stop_token_below_the_least_number_is_no_end(text_model: TextModel) -> None:
    it = lossy(text_model, knobs={"stop_token_ids": (41,), "min_new_tokens": 3})
    it.lose([40, 41])
    assert it.asked().sampling.min_new_tokens == 1


async def test_a_seed_that_a_generator_begins_with_is_not_used_twice(text_model: TextModel) -> None:
    """VLLM's generator would repeat the random numbers of the answer's beginning."""

    def at_vllm(name: str) -> WorkerView:
        view = make_view(name, Role.DECODE, Ability.SEED)
        assert view.description
        engine = replace(view.description.engine, engine="vllm")
        view.description = replace(view.description, engine=engine)
        return view

    it = lossy(text_model, on(at_vllm("decode")), plans=[on(at_vllm("other"))])
    it.lose([40])
    first = it.it.workers.asked["decode"][0].sampling.seed
    assert first is not None
    assert it.asked().sampling.seed not in (None, first)


async def test_reasoning_and_calls_are_read_on_wherever_the_loss_is(tmp_path: Path) -> None:
    model = reading_model(tmp_path)
    ids = model.encode(SPOKEN, add_special_tokens=False)
    how = choose(
        given="hermes",
        told_calls="",
        told_reasoning="",
        template="",
        has_token=model.has_token,
        special_tokens=model.special_tokens,
    )
    assert how is not None
    reading = reading_of(how, (Tool("f", "", ""),), "", one_call=False)

    async def answered(at: int) -> tuple[ChatMessage, int]:
        it = lossy(model, reading=reading, knobs={"max_new_tokens": len(ids)})
        it.lose(ids[:at])
        for token in ids[at:]:
            it.sink().emit([token])
        it.sink().finish(DONE)
        await it.it.client.end()
        message = it.it.turn.choices[0].message
        calls = [replace(call, id="") for call in message.tool_calls]
        return replace(message, tool_calls=tuple(calls)), it.it.turn.usage().reasoning_tokens

    whole = await answered(0)
    assert (whole[0].reasoning, len(whole[0].tool_calls)) == ("hm", 2)
    for at in range(1, len(ids)):
        assert await answered(at) == whole, at


# ---- again, and replayed


async def test_what_the_client_does_not_have_is_dropped_if_it_can_not_be_continued(
    text_model: TextModel,
) -> None:
    it = lossy(text_model, knobs={"constraint": REGEX})
    it.lose([40, 41])
    assert list(it.asked().token_ids) == [1, 2]
    it.sink().emit([50])
    it.sink().finish(DONE)
    await it.it.client.end()
    assert it.ids == [50]
    assert it.ways == [(0, Way.AGAIN)]


@pytest.mark.parametrize("others", [1, 0])
async def test_an_end_that_waited_for_the_prompts_logprobs_is_dropped_with_its_tokens(
    text_model: TextModel, others: int
) -> None:
    """Decode had ended; prefill is lost with the logprobs. Nothing was sent of either."""
    plans = [on(OTHER)] * others
    it = lossy(text_model, PAIR, plans=plans, logprobs=LogprobOptions(prompt=True))
    decode, prefill = (it.it.workers.sinks[name][0] for name in ("decode", "prefill"))
    decode.emit([40], [TokenLogprob(40, -1.0)])
    decode.finish(DONE)
    prefill.fail(GONE)
    if not others:
        await it.it.client.end()
        assert it.it.client.raised is GONE
        return
    it.sink().emit([40, 41], [TokenLogprob(40, -1.0), TokenLogprob(41, -1.0)])
    it.it.client._pull()
    assert it.it.turn.choices[0].finish_reason is None
    it.sink().finish(replace(DONE, prompt_logprobs=(TokenLogprob(1, -1.0),)))
    await it.it.client.end()
    assert (it.ids, it.ways) == ([40, 41], [(0, Way.AGAIN)])


async def test_a_replay_drops_what_the_client_has(text_model: TextModel) -> None:
    it = lossy(text_model, logprobs=LogprobOptions(), temperature=0.0)
    first = it.it.workers.sinks["decode"][0]
    first.emit([40, 41], [TokenLogprob(40, -1.0), TokenLogprob(41, -2.0)])
    it.it.client._pull()
    first.emit([42], [TokenLogprob(42, -3.0)])
    first.fail(GONE)
    assert list(it.asked().token_ids) == [1, 2]
    assert it.asked().logprobs == LogprobOptions()
    it.sink().emit([40], [TokenLogprob(40, -1.0)])
    it.sink().emit([41, 42, 43], [TokenLogprob(i, -float(i)) for i in (41, 42, 43)])
    it.sink().finish(DONE)
    await it.it.client.end()
    assert it.ids == [40, 41, 42, 43]
    sent = [e for m in it.it.client.messages for c in m.choices for e in c.logprobs]
    assert [round(entry.logprob) for entry in sent] == [-1, -2, -3, -43]
    assert it.ways == [(3, Way.REPLAY)]


@pytest.mark.parametrize("ends", [False, True], ids=["another token", "an end before"])
async def test_a_replay_that_differs_ends_the_request(text_model: TextModel, *, ends: bool) -> None:
    it = lossy(text_model, knobs={"constraint": REGEX}, temperature=0.0)
    it.it.workers.sinks["decode"][0].emit([40, 41])
    it.it.client._pull()
    it.it.workers.sinks["decode"][0].fail(GONE)
    it.sink().emit([40])
    if ends:
        it.sink().finish(DONE)
    else:
        it.sink().emit([50])
        assert it.it.workers.cancels == ["other"]
    await it.it.client.end()
    assert isinstance(it.it.client.raised, ReplayDifferedError)
    assert it.ids == [40, 41], "what the client has stays"
