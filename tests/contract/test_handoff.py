"""Prefill here, decode there: one ticket, two legs, one answer, and no leg outlives the other."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Any

import grpc
import pytest

from millstream.v1 import generation_pb2, processor_pb2, sampling_pb2, worker_pb2
from millstream_server.control.engine import Role
from millstream_server.engines.adapter import EngineContext, TextEngineSettings
from millstream_server.engines.simulated import transfer
from millstream_server.engines.simulated.adapter import SimulatedSettings, engine_config
from millstream_server.engines.simulated.engine import SimulatedConfig
from millstream_server.processor.admission import QueueLimits
from millstream_server.processor.text.tokenizer import TextModel
from millstream_testing.in_process import (
    ALPHABET,
    KEY,
    MODEL,
    InProcessProcessor,
    InProcessWorker,
    processor,
    suite,
    worker,
)
from millstream_testing.waiting import until
from tests.support.processor.chats import (
    CANCEL,
    Conversation,
    chat,
    completion,
    gather,
    options,
    start,
    user_turn,
)
from tests.support.wire.failures import refusal
from tests.support.worker.older_relay import older
from tests.support.worker.worker_streams import decode_stream, prefill_stream

CANCELLED = generation_pb2.FINISH_REASON_CANCELLED
LENGTH = generation_pb2.FINISH_REASON_LENGTH
PREFILL = replace(ALPHABET, role=Role.PREFILL)
DECODE = replace(ALPHABET, role=Role.DECODE, step_s=0.002)
SLOW_PREFILL = replace(PREFILL, prefill_s_per_token=60.0)


@dataclass
class Pair:
    """A Processor over one prefill and one decode worker."""

    front: InProcessProcessor
    prefill: InProcessWorker
    decode: InProcessWorker

    async def until_idle(self) -> None:
        await self.prefill.until_idle()
        await self.decode.until_idle()


@contextlib.asynccontextmanager
async def pair(
    text_model: TextModel,
    prefill: SimulatedConfig = PREFILL,
    decode: SimulatedConfig = DECODE,
) -> AsyncIterator[Pair]:
    async with (
        worker(prefill) as first,
        worker(decode) as second,
        processor({MODEL: text_model}, [first.address, second.address]) as front,
    ):
        yield Pair(front, first, second)


# ---- the two legs by hand


@pytest.mark.parametrize("decode_first", [False, True])
async def test_the_legs_meet_in_either_order(decode_first: bool) -> None:  # noqa: FBT001
    async with worker(PREFILL) as first, worker(DECODE) as second:
        info = (await first.about.GetWorkerInfo(worker_pb2.GetWorkerInfoRequest())).info
        ticket = KEY.mint(info.bootstrap_host, info.bootstrap_port)
        up, down = prefill_stream(first.prefill), decode_stream(second.decode)
        if decode_first:
            await down.start(0, [7, 8], ticket=ticket, max_new_tokens=3)
            await second.until_running(1)
        await up.start(5, [7, 8], ticket=ticket, max_new_tokens=3)
        if not decode_first:
            await first.until_running(1)
            await down.start(0, [7, 8], ticket=ticket, max_new_tokens=3)
        (prefilled,), (decoded,) = await up.ended(5), await down.ended(0)
        assert decoded.token_ids == [9, 10, 11]
        assert decoded.finish is not None
        assert decoded.finish.usage.completion_tokens == 3
        assert prefilled.token_ids == []
        assert prefilled.finish is not None
        assert prefilled.finish.reason == LENGTH
        assert prefilled.finish.usage.prompt_tokens == 2
        await first.until_idle()
        await second.until_idle()


async def test_a_cancelled_prefill_leg_fails_a_decode_leg_that_waits_for_it() -> None:
    async with worker(PREFILL) as first, worker(replace(DECODE, handoff_wait_s=0.3)) as second:
        info = (await first.about.GetWorkerInfo(worker_pb2.GetWorkerInfoRequest())).info
        ticket = KEY.mint(info.bootstrap_host, info.bootstrap_port)
        up, down = prefill_stream(first.prefill), decode_stream(second.decode)
        await up.start(0, [7, 8], ticket=ticket)
        await first.until_running(1)
        await up.cancel(0)
        await up.ended(0)
        await down.start(0, [7, 8], ticket=ticket)
        (decoded,) = await down.ended(0)
        assert decoded.reason == "KV_TRANSFER_FAILED"
        await second.until_idle()


async def test_a_leg_left_alone_ends_in_time() -> None:
    async with worker(replace(PREFILL, handoff_wait_s=0.2)) as first:
        info = (await first.about.GetWorkerInfo(worker_pb2.GetWorkerInfoRequest())).info
        up = prefill_stream(first.prefill)
        await up.start(0, [7], ticket=KEY.mint(info.bootstrap_host, info.bootstrap_port))
        (alone,) = await up.ended(0)
        assert alone.error is not None
        assert alone.error.code == grpc.StatusCode.UNAVAILABLE.value[0]
        assert alone.reason == "KV_TRANSFER_FAILED"
        assert alone.error.retryable
        await first.until_idle()


async def test_legs_with_different_prompts_are_found_out() -> None:
    async with worker(PREFILL) as first, worker(DECODE) as second:
        info = (await first.about.GetWorkerInfo(worker_pb2.GetWorkerInfoRequest())).info
        ticket = KEY.mint(info.bootstrap_host, info.bootstrap_port)
        up, down = prefill_stream(first.prefill), decode_stream(second.decode)
        await up.start(0, [7, 8], ticket=ticket)
        await down.start(0, [7, 9], ticket=ticket)
        (decoded,) = await down.ended(0)
        assert decoded.reason == "KV_TRANSFER_FAILED"


# ---- through a Processor


async def test_answers_are_those_of_an_aggregated_worker(text_model: TextModel) -> None:
    opts = options(
        30,
        stop=["KLM"],
        n=2,
        return_token_ids=True,
        logprobs=sampling_pb2.LogprobOptions(top=1, prompt=False),
    )
    async with suite(text_model) as (front, _):
        expected = await chat(front.stub, "hi", opts=opts)
    async with pair(text_model) as both:
        answer = await chat(both.front.stub, "hi", opts=opts)
        assert answer.choices == expected.choices
        assert answer.usage == expected.usage
        await both.until_idle()
        models = await both.front.stub.ListModels(processor_pb2.ListModelsRequest())
        assert {workers.role for workers in models.models[0].workers} == {
            worker_pb2.WORKER_ROLE_PREFILL,
            worker_pb2.WORKER_ROLE_DECODE,
        }
        assert worker_pb2.ENGINE_ABILITY_LOGIT_BIAS in models.models[0].abilities


async def test_many_at_once(text_model: TextModel) -> None:
    async with pair(text_model) as both:
        answers = await asyncio.gather(
            *(chat(both.front.stub, f"hi {i}", opts=options(20)) for i in range(50))
        )
        assert {answer.text for answer in answers} == {"ABCDEFGHIJKLMNOPQRST"}
        await both.until_idle()


async def test_several_turns(text_model: TextModel) -> None:
    async with pair(text_model) as both:
        conversation = Conversation(both.front.stub)
        await conversation.say(start("hi", opts=options(3)), user_turn("and"), user_turn("on"))
        assert [answer.text for answer in await conversation.end()] == ["ABC"] * 3
        await both.until_idle()


async def test_both_legs_start_at_once(text_model: TextModel) -> None:
    async with pair(text_model, prefill=SLOW_PREFILL) as both:
        conversation = Conversation(both.front.stub)
        await conversation.say(start("hi", opts=options(3)))
        await both.prefill.until_running(1)
        await both.decode.until_running(1)
        conversation.call.cancel()
        await both.until_idle()


@pytest.mark.parametrize("way", ["message", "rpc", "deadline"])
async def test_ending_during_prefill_frees_both(text_model: TextModel, way: str) -> None:
    async with pair(text_model, prefill=SLOW_PREFILL) as both:
        timeout = {"timeout": 0.5} if way == "deadline" else {}
        conversation = Conversation(both.front.stub, **timeout)
        await conversation.say(start("hi", opts=options(3)))
        await both.prefill.until_running(1)
        await both.decode.until_running(1)
        if way == "message":
            await conversation.say(CANCEL)
            answer = await conversation.answer()
            assert answer.finish_reason == CANCELLED
            assert answer.usage.completion_tokens == 0
        elif way == "rpc":
            conversation.call.cancel()
        else:
            failed = await refusal(conversation.call)
            assert failed.code is grpc.StatusCode.DEADLINE_EXCEEDED
        await both.until_idle()


async def test_ending_while_prefill_waits_for_decode_frees_both(text_model: TextModel) -> None:
    async with pair(text_model, decode=replace(DECODE, max_running_requests=1)) as both:
        # As when another Processor has filled the worker: ours would else wait before it starts.
        both.front.core.front.queues[MODEL]._limits = QueueLimits(max_running=2)
        first, second = Conversation(both.front.stub), Conversation(both.front.stub)
        await first.say(start("hi", opts=options(400)))
        await first.read()
        await both.prefill.until_idle()
        await second.say(start("hi", opts=options(400)))
        await both.prefill.until_running(1)  # its cache is ready; decode has no room for it
        await second.say(CANCEL)
        answer = await second.answer()
        assert answer.finish_reason == CANCELLED
        await both.prefill.until_idle()
        await first.say(CANCEL)
        await first.answer()
        await both.until_idle()


@pytest.mark.parametrize("way", ["message", "rpc"])
async def test_ending_during_decode_frees_both(text_model: TextModel, way: str) -> None:
    async with pair(text_model) as both:
        conversation = Conversation(both.front.stub)
        await conversation.say(start("hi", opts=options(400)))
        await conversation.read()
        if way == "message":
            await conversation.say(CANCEL)
            answer = await conversation.answer()
            assert answer.finish_reason == CANCELLED
            assert 0 < answer.usage.completion_tokens < 400
        else:
            conversation.call.cancel()
        await both.until_idle()


async def test_a_failed_prefill_leg_ends_the_request_and_aborts_decode(
    text_model: TextModel,
) -> None:
    async with pair(text_model, prefill=SLOW_PREFILL) as both:
        conversation = Conversation(both.front.stub)
        await conversation.say(start("hi", opts=options(3)))
        await both.prefill.until_running(1)
        await both.decode.until_running(1)
        await both.prefill.engine.close()
        failed = await refusal(conversation.call)
        assert failed.code is grpc.StatusCode.UNAVAILABLE
        assert failed.reason in ("ENGINE_FAILED", "KV_TRANSFER_FAILED")  # whichever came first
        assert failed.retryable
        await both.decode.until_idle()


async def test_a_failed_decode_leg_ends_the_request_and_aborts_prefill(
    text_model: TextModel,
) -> None:
    async with pair(text_model, SLOW_PREFILL, replace(DECODE, handoff_wait_s=0.2)) as both:
        conversation = Conversation(both.front.stub)
        await conversation.say(start("hi", opts=options(3)))
        failed = await refusal(conversation.call)
        assert failed.code is grpc.StatusCode.UNAVAILABLE
        assert failed.reason == "KV_TRANSFER_FAILED"
        assert failed.retryable
        await both.until_idle()


def _of_settings(transfer_timeout_s: float, **own: Any) -> list[SimulatedConfig]:
    """Make those of a prefill and a decode worker with these settings."""
    common = TextEngineSettings(transfer_timeout_s=transfer_timeout_s)
    context = EngineContext(common=common, model_path=None, model_name=MODEL)
    of_both = engine_config(SimulatedSettings(vocab_size=ALPHABET.vocab_size, **own), context)
    return [replace(of_both, role=role) for role in (Role.PREFILL, Role.DECODE)]


async def test_a_prompt_may_take_longer_than_a_transfer(text_model: TextModel) -> None:
    """Neither prefill's queue nor what it computes counts."""
    prefill, decode = _of_settings(0.05, prefill_s_per_token=0.1)
    async with pair(text_model, replace(prefill, max_running_requests=1), decode) as both:
        answers = await asyncio.gather(
            *(chat(both.front.stub, text, opts=options(3)) for text in ("hi", "ho"))
        )
        assert [answer.text for answer in answers] == ["ABC"] * 2
        await both.until_idle()


async def test_a_prompt_that_is_computed_waits_for_room_at_decode(text_model: TextModel) -> None:
    prefill, decode = _of_settings(0.05, step_s=0.005)
    async with pair(text_model, prefill, replace(decode, max_running_requests=1)) as both:
        # As when another Processor has filled the worker.
        both.front.core.front.queues[MODEL]._limits = QueueLimits(max_running=2)
        first, second = Conversation(both.front.stub), Conversation(both.front.stub)
        await first.say(start("hi", opts=options(400)))
        await first.read()
        await both.prefill.until_idle()
        await second.say(start("hi", opts=options(3)))
        assert (await second.answer()).text == "ABC"  # two seconds later
        assert (await first.answer()).finish_reason == LENGTH
        await both.until_idle()


async def test_a_draining_prefill_worker_gets_no_requests(
    text_model: TextModel,
) -> None:
    async with pair(text_model) as both:
        await both.prefill.host.drain(0.5, 5)
        conversation = Conversation(both.front.stub)
        await conversation.say(start("hi", opts=options(3)))
        failed = await refusal(conversation.call)
        assert failed.code is grpc.StatusCode.UNAVAILABLE
        assert failed.reason == "NO_WORKER"
        assert "prefill" in failed.message
        await both.until_idle()


async def test_prompt_logprobs_come_from_the_leg_that_runs_the_prompt(
    text_model: TextModel,
) -> None:
    async with pair(text_model) as both:
        opts = options(1, logprobs=sampling_pb2.LogprobOptions(prompt=True))
        answer = await gather(both.front.stub.Complete(completion([7, 8, 9], opts)))
        assert answer.finished is not None
        assert [entry.token_id for entry in answer.prompt_logprobs] == [7, 8, 9]
        await both.until_idle()


# ---- prefill first


FIRST = replace(PREFILL, prefill_first=True)
SECOND = replace(DECODE, prefill_first=True)
SLOW_FIRST = replace(SLOW_PREFILL, prefill_first=True)


async def test_in_sequence_answers_are_the_same(text_model: TextModel) -> None:
    async with pair(text_model, FIRST, SECOND) as both:
        answers = await asyncio.gather(
            *(chat(both.front.stub, f"hi {i}", opts=options(20, n=2)) for i in range(20))
        )
        assert {answer.text for answer in answers} == {"ABCDEFGHIJKLMNOPQRST"}
        await both.until_idle()


@pytest.mark.parametrize("way", ["message", "rpc", "deadline"])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
async def test_a_sequence_ends_at_once_in_each_phase(
    text_model: TextModel, phase: str, way: str
) -> None:
    first, second = (SLOW_FIRST, SECOND) if phase == "prefill" else (FIRST, SECOND)
    async with pair(text_model, first, second) as both:
        timeout = {"timeout": 0.5} if way == "deadline" else {}
        conversation = Conversation(both.front.stub, **timeout)
        await conversation.say(start("hi", opts=options(400)))
        running, idle = both.prefill, both.decode
        if phase == "decode":
            running, idle = idle, running
        await running.until_running(1)
        assert (await idle.engine.load()).running_requests == 0
        if way == "message":
            await conversation.say(CANCEL)
            while (answer := await conversation.answer()).finish_reason is None:
                pass
            assert answer.finish_reason == CANCELLED
        elif way == "rpc":
            conversation.call.cancel()
        else:
            failed = await refusal(conversation.call)
            assert failed.code is grpc.StatusCode.DEADLINE_EXCEEDED
        await both.until_idle()


@pytest.mark.parametrize("phase", ["prefill", "decode"])
async def test_a_failed_leg_ends_a_sequence(text_model: TextModel, phase: str) -> None:
    first = SLOW_FIRST if phase == "prefill" else FIRST
    async with pair(text_model, first, SECOND) as both:
        conversation = Conversation(both.front.stub)
        await conversation.say(start("hi", opts=options(400)))
        fails = both.prefill if phase == "prefill" else both.decode
        await fails.until_running(1)
        await fails.engine.close()
        failed = await refusal(conversation.call)
        assert failed.code is grpc.StatusCode.UNAVAILABLE
        assert failed.reason == "ENGINE_FAILED"
        assert failed.retryable
        await both.until_idle()


async def test_ways_of_handing_off_are_never_mixed(text_model: TextModel) -> None:
    async with (
        worker(PREFILL) as one,
        worker(FIRST) as two,
        worker(DECODE) as three,
        worker(SECOND) as four,
        processor({MODEL: text_model}, [w.address for w in (one, two, three, four)]) as front,
    ):
        for _ in range(4):
            answers = await asyncio.gather(
                *(chat(front.stub, f"hi {i}", opts=options(3)) for i in range(10))
            )
            assert {answer.text for answer in answers} == {"ABC"}


async def test_workers_that_fit_no_other_are_named(text_model: TextModel) -> None:
    async with (
        worker(PREFILL) as one,
        worker(SECOND) as two,
        processor({MODEL: text_model}, [one.address, two.address], wait=False) as front,
    ):
        await until(lambda: front.router.of(MODEL).unpaired is not None)
        assert front.server.conditions.holding == ("no workers",)
        failed = await refusal(front.stub.Complete(completion("A")))
        assert (failed.code, failed.reason) == (grpc.StatusCode.UNAVAILABLE, "NO_WORKER")
        assert "('simulated' against 'simulated.prefill_first')" in failed.message


@pytest.mark.parametrize("older", [{Role.PREFILL}, {Role.DECODE}, {Role.PREFILL, Role.DECODE}])
async def test_workers_of_version_0_1_0_hand_off(
    text_model: TextModel, monkeypatch: pytest.MonkeyPatch, older: set[Role]
) -> None:
    """They name no kind, and refuse what is in no ticket of theirs.

    The other way round, tickets of a Processor of that version, is what `KEY.mint` makes above.
    """
    of = transfer.way
    monkeypatch.setattr(transfer, "way", lambda c: None if c.role in older else of(c))
    async with pair(text_model) as both:
        assert (await chat(both.front.stub, "hi", opts=options(3))).text == "ABC"
        await both.until_idle()


@pytest.mark.parametrize(
    "older_roles", [{Role.PREFILL}, {Role.DECODE}, {Role.PREFILL, Role.DECODE}]
)
async def test_contract_0_1_0_on_the_wire(text_model: TextModel, older_roles: set[Role]) -> None:
    """The Processor meets workers of that version, and the workers a Processor of it."""
    async with contextlib.AsyncExitStack() as stack:
        workers, relays, addresses = [], [], []
        for config in (PREFILL, DECODE):
            workers.append(await stack.enter_async_context(worker(config)))
            address = workers[-1].address
            if config.role in older_roles:
                address, relay = await stack.enter_async_context(older(address))
                relays.append(relay)
            addresses.append(address)
        front = await stack.enter_async_context(processor({MODEL: text_model}, addresses))
        answers = await asyncio.gather(
            *(chat(front.stub, f"hi {i}", opts=options(20, n=2)) for i in range(5))
        )
        assert {answer.text for answer in answers} == {"ABCDEFGHIJKLMNOPQRST"}
        for one in workers:
            await one.until_idle()
        for relay in relays:
            assert relay.cut_responses > 0  # a worker says more than that version knows
            assert relay.cut_requests == 0  # a Processor asks an older worker nothing new
