"""A Processor under overload: which requests wait, are refused, or go first."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from millstream.v1 import (
    generation_pb2,
    processor_pb2,
    processor_pb2_grpc,
    sampling_pb2,
)
from millstream_server.control.engine import Role
from millstream_server.processor.admission import AdmissionQueue, QueueLimits
from millstream_server.processor.core import ProcessorCore
from millstream_server.processor.output import Pacer
from millstream_server.processor.requests import RequestLimits
from millstream_server.processor.servicer import ProcessorServicer
from millstream_server.processor.text.tokenizer import TextModel
from millstream_server.routing.router import Router
from millstream_server.runtime.rpc.limits import LimitsLayer, RpcLimits
from millstream_server.runtime.rpc.reflection import add_reflection
from millstream_server.runtime.telemetry.metrics import REGISTRY
from millstream_testing.in_process import (
    ALPHABET,
    MODEL,
    InProcessWorker,
    make_core,
    make_fleet,
    worker,
)
from millstream_testing.waiting import until
from tests.support.processor.chats import (
    CANCEL,
    Answer,
    Conversation,
    chat,
    completion,
    gather,
    options,
    start,
    user_turn,
)
from tests.support.wire.failures import Failure, refusal
from tests.support.wire.transports import new_server
from tests.support.worker.worker_streams import decode_stream

SERVICE = "millstream.v1.ProcessorService"
CANCELLED = generation_pb2.FINISH_REASON_CANCELLED
LENGTH = generation_pb2.FINISH_REASON_LENGTH
TWO = replace(ALPHABET, step_s=0.01, max_running_requests=2)
ENDLESS = options(400)
HIGH, LOW = processor_pb2.REQUEST_PRIORITY_HIGH, processor_pb2.REQUEST_PRIORITY_LOW


FEW_TOKENS = replace(ALPHABET, block_size=4, total_blocks=30)
"""The worker refuses more than 480 prompt tokens at once."""


class Counted:
    """Stands where a core's `LoadMeter` would: which requests ended, which of them as failures."""

    def __init__(self) -> None:
        self.ends: list[bool] = []

    def finished(self, *, failed: bool = False) -> None:
        self.ends.append(failed)


def _input_tokens() -> float:
    labels = {"gen_ai_request_model": MODEL, "gen_ai_token_type": "input"}
    return REGISTRY.get_sample_value("millstream_tokens_total", labels) or 0.0


@dataclass
class Front:
    """A Processor with limits."""

    core: ProcessorCore
    router: Router
    rpcs: LimitsLayer
    channel: Any

    @property
    def stub(self) -> Any:
        return processor_pb2_grpc.ProcessorServiceStub(self.channel)

    @property
    def queue(self) -> AdmissionQueue:
        return self.core.front.queues[MODEL]

    async def fill(self, count: int = 2, **fields: Any) -> list[Conversation]:
        """Have so many endless chats run."""
        before = self.queue.running
        chats = [await self.say(**fields) for _ in range(count)]
        await until(lambda: self.queue.running == before + count)
        for conversation in chats:
            await conversation.read()
        return chats

    async def say(self, **fields: Any) -> Conversation:
        """Open a chat and send its start."""
        conversation = Conversation(self.stub)
        await conversation.say(start("hi", **{"opts": ENDLESS, **fields}))
        return conversation

    async def line_up(self, **fields: Any) -> Conversation:
        """Open a chat that has to wait."""
        before = self.queue.queued
        conversation = await self.say(**fields)
        await until(lambda: self.queue.queued == before + 1)
        return conversation

    async def empty(self) -> None:
        """Wait until no request runs or waits."""
        await until(lambda: (self.queue.running, self.queue.queued) == (0, 0))
        await until(lambda: (self.rpcs.streams.used, self.core.work.count) == (0, 0))
        assert (self.queue.waiting.tokens, self.rpcs.bytes.used) == (0, 0)


@contextlib.asynccontextmanager
async def front(
    text_model: TextModel,
    workers: Sequence[InProcessWorker],
    limits: RequestLimits,
    rpcs: RpcLimits,
    connected: int,
) -> AsyncIterator[Front]:
    layer = LimitsLayer((SERVICE,), rpcs)
    server = new_server(layer)
    router, fleet = make_fleet([w.address for w in workers])
    pacer = Pacer(0.05)
    core = make_core({MODEL: text_model}, router, fleet, pacer, limits=limits)
    processor_pb2_grpc.add_ProcessorServiceServicer_to_server(ProcessorServicer(core), server)
    health = HealthServicer()
    await health.set("", health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    add_reflection(server, (SERVICE,))
    port = server.bind("127.0.0.1:0")
    await server.start()
    fleet.open()
    pacer.open()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            await until(lambda: sum(router.connected(MODEL).values()) == connected)
            yield Front(core, router, layer, channel)
    finally:
        await server.stop(0)
        await pacer.close()
        await fleet.close()
        core.prompts.close()


@contextlib.asynccontextmanager
async def crowded(
    text_model: TextModel,
    *,
    limits: RequestLimits | None = None,
    rpcs: RpcLimits | None = None,
    loaded: Sequence[bool] = (True,),
    **queue: Any,
) -> AsyncIterator[tuple[Front, list[InProcessWorker]]]:
    """A Processor over workers that run two requests each; ``queue`` are its limits."""
    limits = limits or RequestLimits(queue=QueueLimits(**queue))
    async with contextlib.AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(worker(TWO, loaded=now)) for now in loaded]
        yield (
            await stack.enter_async_context(
                front(text_model, workers, limits, rpcs or RpcLimits(), sum(loaded))
            ),
            workers,
        )


async def _stop(*conversations: Conversation) -> None:
    for conversation in conversations:
        conversation.call.cancel()


def _assert_overloaded(failed: Failure, says: str, delay_s: float | None = None) -> None:
    assert failed.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert (failed.reason, failed.retryable) == ("OVERLOADED", True)
    assert says in failed.message
    assert failed.retry_delay_s is not None
    if delay_s is not None:
        assert failed.retry_delay_s == pytest.approx(delay_s, rel=0.21)
    assert 0.08 <= failed.retry_delay_s <= 36


# ---- the queue


async def test_what_finds_no_room_waits_and_is_answered(text_model: TextModel) -> None:
    async with crowded(text_model) as (two, (one,)):
        answers = await asyncio.gather(
            *(chat(two.stub, "hi", opts=options(6, n=1 + i % 2)) for i in range(12)),
            *(gather(two.stub.Complete(completion("hi@", options(6)))) for _ in range(4)),
        )
        assert {choice.text for a in answers for choice in a.choices.values()} == {"ABCDEF"}
        await two.empty()
        await one.until_idle()


async def test_the_engine_never_has_more_than_it_runs(text_model: TextModel) -> None:
    async with crowded(text_model) as (two, (one,)):
        held = [*await two.fill(2), *[await two.line_up() for _ in range(3)]]
        load = await one.engine.load()
        assert (load.running_requests, load.queued_requests) == (2, 0)
        await _stop(*held)
        await two.empty()


async def test_a_full_queue_refuses_and_the_server_stays_healthy(text_model: TextModel) -> None:
    async with crowded(text_model, max_queued=2) as (two, _):
        held = [*await two.fill(2), await two.line_up(), await two.line_up()]
        refused = [
            await refusal((await two.say()).call),
            await refusal(two.stub.Complete(completion("hi", ENDLESS))),
        ]
        for failed in refused:
            _assert_overloaded(failed, "the queue is full (2 waiting)", 1.0)
        health = health_pb2_grpc.HealthStub(two.channel)
        answer = await health.Check(health_pb2.HealthCheckRequest())
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        asked: Any = reflection_pb2_grpc.ServerReflectionStub(two.channel)
        call = asked.ServerReflectionInfo(
            iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        )
        assert SERVICE in [s.name for s in (await call.read()).list_services_response.service]
        await _stop(*held)
        await two.empty()


async def test_tokens_of_waiting_requests_are_bounded(text_model: TextModel) -> None:
    async with crowded(text_model, max_queued_tokens=1000) as (two, _):
        held = [*await two.fill(2), await two.line_up(), await two.line_up()]
        _assert_overloaded(await refusal((await two.say()).call), "more than 1000")
        held.append(await two.line_up(opts=options(2)))
        _assert_overloaded(await refusal((await two.say(opts=options(40, n=4))).call), "1000")
        await _stop(*held)
        await two.empty()


async def test_high_priority_overtakes_and_displaces(text_model: TextModel) -> None:
    async with crowded(text_model, max_queued=3) as (two, _):
        running = await two.fill(2)
        low = await two.line_up(opts=options(400, priority=LOW))
        normal = await two.line_up()
        high = await two.line_up(opts=options(400, priority=HIGH))
        highest = await two.say(opts=options(400, priority=HIGH))
        _assert_overloaded(await refusal(low.call), "higher priority took")
        await _stop(running[0])
        await high.read()
        await _stop(running[1])
        await highest.read()
        assert (two.queue.running, two.queue.queued) == (2, 1)
        assert normal.answers == []
        await _stop(high)
        await normal.read()
        assert normal.answers[0].started is not None
        await _stop(normal, highest)
        await two.empty()


async def test_a_deadline_shorter_than_the_queue_is_refused_at_once(text_model: TextModel) -> None:
    async with crowded(text_model) as (two, _):
        await asyncio.gather(*(chat(two.stub, "hi", opts=options(60)) for _ in range(8)))
        held = [*await two.fill(2), *[await two.line_up() for _ in range(8)]]
        hurried = Conversation(two.stub, timeout=1.5)  # some (8 + 1) x 0.6 s / 2 wait before it
        await hurried.say(start("hi", opts=ENDLESS))
        failed = await refusal(hurried.call)
        _assert_overloaded(failed, "its deadline is in 1.")
        assert "would wait about" in failed.message
        assert two.queue.queued == 8
        await _stop(*held)
        await two.empty()


async def test_a_deadline_that_passes_in_the_queue(text_model: TextModel) -> None:
    async with crowded(text_model) as (two, _):
        held = await two.fill(2)
        for call in (
            Conversation(two.stub, timeout=0.2),
            two.stub.Complete(completion("hi", ENDLESS), timeout=0.2),
        ):
            if isinstance(call, Conversation):
                await call.say(start("hi", opts=ENDLESS))
                call = call.call  # noqa: PLW2901
            failed = await refusal(call)
            assert failed.code is grpc.StatusCode.DEADLINE_EXCEEDED
            assert failed.reason in ("", "DEADLINE_EXCEEDED")  # whoever noticed first
            await until(lambda: two.queue.queued == 0)
        await _stop(*held)
        await two.empty()


# ---- leaving the queue


async def test_a_cancel_message_takes_a_waiting_turn_out(text_model: TextModel) -> None:
    async with crowded(text_model, max_queued=1) as (two, (one,)):
        held = await two.fill(2)
        waiting = await two.line_up(opts=options(100, n=2))
        await waiting.say(CANCEL)
        answer = await waiting.answer()
        assert [c.finish_reason for c in answer.choices.values()] == [CANCELLED, CANCELLED]
        assert answer.text == ""
        assert answer.usage.completion_tokens == 0
        assert answer.usage.prompt_tokens > 0
        assert two.queue.queued == 0
        assert (await one.engine.load()).queued_requests == 0
        # the place in the queue is free, and the conversation goes on
        await waiting.say(user_turn("go on", options(2)))
        await until(lambda: two.queue.queued == 1)
        await _stop(held[0])
        assert (await waiting.answer(2)).text == "AB"
        await waiting.end()
        await _stop(*held)
        await two.empty()


async def test_a_cancel_sent_with_a_start_that_has_to_wait(text_model: TextModel) -> None:
    async with crowded(text_model) as (two, _):
        held = await two.fill(2)
        waiting = Conversation(two.stub)
        await waiting.say(start("hi", opts=ENDLESS), CANCEL)
        (answer,) = await waiting.end()
        assert answer.finish_reason == CANCELLED
        await _stop(*held)
        await two.empty()


async def test_cancelling_the_rpc_takes_it_out(text_model: TextModel) -> None:
    async with crowded(text_model, max_queued=1) as (two, _):
        held = await two.fill(2)
        waiting = await two.line_up()
        waiting.call.cancel()
        await until(lambda: two.queue.queued == 0)
        call = two.stub.Complete(completion("hi", ENDLESS))
        await until(lambda: two.queue.queued == 1)
        call.cancel()
        await until(lambda: two.queue.queued == 0)
        await _stop(*held)
        await two.empty()


async def test_a_broken_rule_ends_a_waiting_conversation_at_once(text_model: TextModel) -> None:
    async with crowded(text_model) as (two, _):
        held = await two.fill(2)
        waiting = await two.line_up()
        await waiting.say(start("again"))
        failed = await refusal(waiting.call)
        assert (failed.code, failed.fields) == (grpc.StatusCode.INVALID_ARGUMENT, ("start",))
        assert two.queue.queued == 0
        await _stop(*held)
        await two.empty()


async def test_a_drain_answers_those_that_wait_and_refuses_new_ones(text_model: TextModel) -> None:
    async with crowded(text_model) as (two, _):
        held = await two.fill(2)
        waiting = [await two.line_up(opts=options(5)) for _ in range(3)]
        for conversation in waiting:
            await conversation.call.done_writing()
        drained = asyncio.ensure_future(two.core.work.drain(0, 10))
        await until(lambda: two.core.work.refusing)
        failed = await refusal(two.stub.Complete(completion("hi", ENDLESS)))
        assert (failed.code, failed.reason) == (grpc.StatusCode.UNAVAILABLE, "UNAVAILABLE")
        await _stop(*held)
        for conversation in waiting:
            assert (await conversation.end())[0].text == "ABCDE"
        assert await drained
        await two.empty()


async def test_turns_that_were_asked_for_before_a_shutdown_are_answered(
    text_model: TextModel,
) -> None:
    async with crowded(text_model) as (two, _):
        conversation = Conversation(two.stub)
        await conversation.say(start("hi", opts=options(60)), user_turn("on", options(3)))
        await conversation.read()
        drained = asyncio.ensure_future(two.core.work.drain(0.05, 10))
        await until(lambda: two.core.work.refusing)
        assert conversation.answers[0].finished is None, "too early to show anything"
        await conversation.say(user_turn("late"))
        assert len((await conversation.answer(1)).text) == 60
        assert len((await conversation.answer(2)).text) == 3
        failed = await refusal(conversation.answer(3))
        assert (failed.code, failed.reason) == (grpc.StatusCode.UNAVAILABLE, "UNAVAILABLE")
        assert "another one" in failed.message
        assert failed.retry_delay_s is not None
        assert await drained
        await two.empty()


async def test_a_turn_whose_template_is_rendered_when_a_shutdown_begins_is_answered(
    text_model: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with crowded(text_model) as (two, _):
        render, begun, go_on = two.core.prompts.of_chat, asyncio.Event(), asyncio.Event()

        async def slow(*arguments: Any, **more: Any) -> Any:
            begun.set()
            await go_on.wait()
            return await render(*arguments, **more)

        monkeypatch.setattr(two.core.prompts, "of_chat", slow)
        asked = asyncio.ensure_future(chat(two.stub, "hi", opts=options(3)))
        await begun.wait()
        drained = asyncio.ensure_future(two.core.work.drain(0, 10))
        await until(lambda: two.core.work.refusing)
        failed = await refusal(chat(two.stub, "hi", opts=options(3)))
        assert (failed.code, failed.reason) == (grpc.StatusCode.UNAVAILABLE, "UNAVAILABLE")
        assert failed.retry_delay_s is not None
        go_on.set()
        assert (await asked).text == "ABC"
        assert await drained


# ---- workers that come and go


async def test_a_worker_that_comes_takes_waiting_requests(text_model: TextModel) -> None:
    async with crowded(text_model, loaded=(True, False)) as (two, workers):
        held = [*await two.fill(2), *[await two.line_up() for _ in range(3)]]
        await workers[1].load()
        await until(lambda: (two.queue.running, two.queue.queued) == (4, 1))
        await workers[1].until_running(2)
        await _stop(*held)
        await two.empty()


async def test_waiting_requests_survive_a_restart_of_the_only_worker(text_model: TextModel) -> None:
    async with crowded(text_model, loaded=(True, False)) as (two, workers):
        running = await two.fill(2)
        waiting = await two.line_up(opts=options(3))
        await workers[0].server.stop(0)
        for conversation in running:
            failed = await refusal(conversation.end())
            assert failed.reason == "WORKER_LOST"
        failed = await refusal(two.stub.Complete(completion("hi", ENDLESS)))
        assert (failed.code, failed.reason) == (grpc.StatusCode.UNAVAILABLE, "NO_WORKER")
        assert two.queue.queued == 1
        await workers[1].load()
        assert (await waiting.answer()).text == "ABC"
        await waiting.end()
        await two.empty()


async def test_waiting_requests_fail_when_no_worker_comes_back(text_model: TextModel) -> None:
    async with crowded(text_model, comeback_s=0.05) as (two, workers):
        running = await two.fill(2)
        waiting = await two.line_up()
        await workers[0].server.stop(0)
        failed = await refusal(waiting.call)
        assert (failed.code, failed.reason) == (grpc.StatusCode.UNAVAILABLE, "NO_WORKER")
        assert failed.retryable
        await _stop(*running)
        await two.empty()


async def test_what_a_draining_worker_still_runs_delays_no_request_elsewhere(
    text_model: TextModel,
) -> None:
    async with crowded(text_model, loaded=(True, False)) as (two, workers):
        on_first = await two.fill(2)
        await workers[1].load()
        await until(lambda: two.queue.limit == 4)
        on_second = await two.fill(2)
        waiting = await two.line_up()
        drain = asyncio.ensure_future(workers[0].host.work.drain(0, 20))
        await until(lambda: sum(two.router.connected(MODEL).values()) == 1)
        assert two.queue.queued == 1
        await _stop(on_second.pop())
        await waiting.read()
        await workers[0].until_running(2)
        assert two.queue.running == 4
        await _stop(*on_first, *on_second, waiting)
        await two.empty()
        await drain


async def test_what_is_refused_or_displaced_counts_as_a_failure_of_ours(
    text_model: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Balancers read it: a Processor that refuses everything must not look idle and well."""
    async with crowded(text_model, max_queued=1, comeback_s=0.05) as (two, workers):
        held = await two.fill(2)
        meter = Counted()
        monkeypatch.setattr(two.core.front, "meter", meter)
        low = await two.line_up(opts=options(400, priority=LOW))
        high = await two.say(opts=options(400, priority=HIGH))
        assert (await refusal(low.call)).reason == "OVERLOADED"
        assert meter.ends == [True]
        await until(lambda: two.queue.queued == 1)
        await workers[0].server.stop(0)
        assert (await refusal(high.call)).reason == "NO_WORKER"
        for conversation in held:
            assert (await refusal(conversation.end())).reason == "WORKER_LOST"
        await two.empty()
        assert meter.ends == [True] * 4
        assert (await refusal(chat(two.stub, "hi"))).reason == "NO_WORKER"
        assert meter.ends == [True] * 5


async def test_prompts_that_never_reach_a_worker_are_no_input(text_model: TextModel) -> None:
    async with crowded(text_model) as (two, _):
        held = await two.fill(2)
        before = _input_tokens()
        waiting = await two.line_up()
        await waiting.say(CANCEL)
        assert (await waiting.answer()).finish_reason == CANCELLED
        await waiting.end()
        assert _input_tokens() == before
        await _stop(*held)
        await two.empty()
        assert _input_tokens() > before


# ---- products


@pytest.mark.parametrize(
    ("opts", "field", "says"),
    [
        (options(61, n=16), "options.n", "16 x (9 prompt tokens + max_new_tokens 61)"),
        (options(60, n=16), "", ""),
        (options(450, n=1), "", ""),
        (
            options(60, n=2, logprobs=sampling_pb2.LogprobOptions(top=4)),
            "options.logprobs.top",
            "2 x 60 tokens x 5 logprobs is more than 599",
        ),
        (options(59, n=2, logprobs=sampling_pb2.LogprobOptions(top=4)), "", ""),
        (
            options(30, n=16, logprobs=sampling_pb2.LogprobOptions(prompt=True)),
            "options.logprobs",
            "16 x 39 tokens x 1 logprobs",
        ),
    ],
    ids=["n", "just n", "just one", "top", "just top", "prompt logprobs"],
)
async def test_products_are_capped_before_anything_is_made_of_them(
    text_model: TextModel, opts: processor_pb2.GenerationOptions, field: str, says: str
) -> None:
    limits = RequestLimits(max_request_tokens=16 * 69, max_request_logprobs=599)
    async with crowded(text_model, limits=limits) as (two, _):
        call = two.stub.Complete(completion([5] * 9, opts))
        if not field:
            await call.read()
            call.cancel()
        else:
            failed = await refusal(call)
            assert failed.code is grpc.StatusCode.INVALID_ARGUMENT
            assert (failed.reason, failed.fields) == ("INVALID_REQUEST", (field,))
            assert says in failed.message
        await two.empty()


async def test_one_answer_that_is_too_long_names_its_length(text_model: TextModel) -> None:
    async with crowded(text_model, limits=RequestLimits(max_request_tokens=100)) as (two, _):
        failed = await refusal((await two.say()).call)
        assert failed.fields == ("start.options.sampling.max_new_tokens",)


async def test_an_unknown_priority_is_refused(text_model: TextModel) -> None:
    unknown: Any = 9
    async with crowded(text_model) as (two, _):
        failed = await refusal((await two.say(opts=options(9, priority=unknown))).call)
        assert failed.code is grpc.StatusCode.INVALID_ARGUMENT
        assert (failed.reason, failed.fields) == ("INVALID_REQUEST", ("start.options.priority",))


# ---- RPCs


async def test_open_conversations_are_bounded(text_model: TextModel) -> None:
    async with crowded(text_model, rpcs=RpcLimits(max_open_streams=2)) as (two, _):
        held = await two.fill(2)
        _assert_overloaded(await refusal(Conversation(two.stub).call), "2 RPCs are open", 1.0)
        tokenize = two.stub.Tokenize(processor_pb2.TokenizeRequest(text="a"))
        _assert_overloaded(await refusal(tokenize), "2 RPCs are open", 1.0)
        await _stop(held[0])
        await until(lambda: two.rpcs.streams.used == 1)
        await two.stub.Tokenize(processor_pb2.TokenizeRequest(text="a"))
        await _stop(*held)
        await two.empty()


async def test_what_conversations_say_is_bounded_in_bytes(text_model: TextModel) -> None:
    async with crowded(text_model, rpcs=RpcLimits(max_open_bytes=200)) as (two, _):
        talkative = Conversation(two.stub)
        await talkative.say(start("x" * 120, opts=options(2)))
        await talkative.answer()
        call = two.stub.Complete(completion("x" * 90, options(2)))
        _assert_overloaded(await refusal(call), "fill its memory", 1.0)
        await talkative.say(user_turn("x" * 90))
        _assert_overloaded(await refusal(talkative.call), "fill its memory", 1.0)
        await two.empty()
        assert (await gather(two.stub.Complete(completion("x" * 90, options(2))))).finished


# ---- a worker's own limits


@pytest.mark.parametrize("roles", [[Role.AGGREGATED], [Role.PREFILL, Role.DECODE]], ids=len)
async def test_prompts_above_a_workers_bound_wait(text_model: TextModel, roles: list[Role]) -> None:
    async with contextlib.AsyncExitStack() as stack:
        workers = [
            await stack.enter_async_context(worker(replace(FEW_TOKENS, role=role)))
            for role in roles
        ]
        limits = RequestLimits(queue=QueueLimits())
        made = front(text_model, workers, limits, RpcLimits(), len(workers))
        one = await stack.enter_async_context(made)
        prompts = [f"{letter}" * 100 for letter in "ABCDEFGHIJKL"]
        asked = [gather(one.stub.Complete(completion(text, options(2)))) for text in prompts]
        answers = await asyncio.gather(*asked)
        assert [answer.usage.prompt_tokens for answer in answers] == [100] * len(prompts)
        await one.empty()


def _limit(one: InProcessWorker, **limits: int) -> None:
    one.host.requests.limits = replace(one.host.requests.limits, **limits)


async def test_a_worker_refuses_what_is_too_much_in_its_slot() -> None:
    async with worker(TWO) as one:
        _limit(one, max_requests=3)
        stream = decode_stream(one.decode)
        for slot in range(4):
            await stream.start(slot, [7], max_new_tokens=400)
        (refused,) = await stream.ended(3)
        assert refused.reason == "OVERLOADED"
        assert refused.error is not None
        assert refused.error.code == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
        assert refused.error.retryable
        assert refused.error.retry_delay.ToNanoseconds() / 1e9 == pytest.approx(1.0, rel=0.21)
        await stream.first_token(0)
        await stream.cancel(0)
        await stream.ended(0)
        await stream.start(3, [7], max_new_tokens=2)
        for slot in (1, 2):
            await stream.cancel(slot)
        ended = await stream.ended(1, 2, 3)
        assert [view.finish is not None for view in ended] == [True] * 3
        await stream.drain()
        await one.until_idle()
        assert (one.host.work.count, one.host.requests.tokens) == (0, 0)


async def test_a_worker_bounds_the_prompts_it_holds() -> None:
    async with worker(TWO) as one:
        _limit(one, max_tokens=100)
        stream = decode_stream(one.decode)
        await stream.start(0, [7] * 300, max_new_tokens=100)  # alone it may
        await stream.first_token(0)
        await stream.start(1, [7], max_new_tokens=1)
        (refused,) = await stream.ended(1)
        assert refused.reason == "OVERLOADED"
        await stream.cancel(0)
        await stream.ended(0)
        for slot in (2, 3):
            await stream.start(slot, [7] * 50, max_new_tokens=5)
        ended = await stream.ended(2, 3)
        assert [view.finish is not None for view in ended] == [True] * 2
        await stream.drain()


async def test_by_default_a_worker_holds_four_times_what_it_runs() -> None:
    async with worker(TWO) as one:
        stream = decode_stream(one.decode)
        for slot in range(9):
            await stream.start(slot, [7], max_new_tokens=400)
        (refused,) = await stream.ended(8)
        assert refused.reason == "OVERLOADED"
        assert all(not stream.slots[slot].terminals for slot in range(8))
        stream.call.cancel()
        await one.until_idle()


async def test_the_processor_passes_a_workers_refusal_on(text_model: TextModel) -> None:
    async with crowded(text_model, max_running=100) as (two, (one,)):
        _limit(one, max_requests=2)
        held = await two.fill(2)
        conversation = await two.say()
        _assert_overloaded(await refusal(conversation.call), "the worker is busy", 1.0)
        await _stop(*held)
        await two.empty()
        answer: Answer = await chat(two.stub, "hi", opts=options(2))
        assert (answer.text, answer.finish_reason) == ("AB", LENGTH)
