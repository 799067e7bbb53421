"""A worker is lost in mid-answer, another one is there: the client sees no gap and no repeat."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import grpc
import pytest

from millstream.v1 import errors_pb2, generation_pb2, processor_pb2, sampling_pb2
from millstream_server.control.engine import Role
from millstream_server.engines.simulated.engine import SimulatedConfig
from millstream_server.processor.text.tokenizer import TextModel
from millstream_testing.in_process import (
    ALPHABET,
    MODEL,
    VOCAB_SIZE,
    InProcessProcessor,
    InProcessWorker,
    processor,
    worker,
)
from millstream_testing.waiting import EOF, until
from tests.support.processor.chats import Answer, completion, options
from tests.support.telemetry.spans import Samples
from tests.support.wire.failures import refusal

ONE = replace(ALPHABET, step_s=0.004)
PREFILL, DECODE = replace(ONE, role=Role.PREFILL), replace(ONE, role=Role.DECODE)
FIRST = replace(DECODE, prefill_first=True)
SLOW = replace(PREFILL, prefill_s_per_token=60.0)
PROMPT = [41, 42]
TOKENS = 120
AGAIN = processor_pb2.REDISPATCH_WAY_AGAIN
CONTINUE = processor_pb2.REDISPATCH_WAY_CONTINUE
LENGTH = generation_pb2.FINISH_REASON_LENGTH
REPLAY = processor_pb2.REDISPATCH_WAY_REPLAY
WITH_STATE = processor_pb2.REDISPATCH_WAY_CONTINUE_WITH_STATE


def counted(first: int, tokens: int = TOKENS) -> list[int]:
    """What the simulated engine generates from ``first`` on."""
    return [(first + i) % VOCAB_SIZE for i in range(tokens)]


@dataclass
class Running:
    """A completion that runs, and what has come of it."""

    call: Any
    answer: Answer

    async def read(self, tokens: int) -> None:
        while sum(choice.token_count for choice in self.answer.choices.values()) < tokens:
            self.answer.add(await self.call.read())

    async def end(self) -> Answer:
        while (response := await self.call.read()) is not EOF:
            self.answer.add(response)
        return self.answer


@dataclass
class Places:
    """A Processor over some workers."""

    front: InProcessProcessor
    workers: list[InProcessWorker]

    async def runs_at(self, role: Role = Role.AGGREGATED) -> InProcessWorker:
        """Return the worker of a role that runs something."""
        found: list[InProcessWorker] = []

        async def running() -> bool:
            for one in self.workers:
                if one.host.plan.role is role and (await one.engine.load()).running_requests:
                    found.append(one)
                    return True
            return False

        await until(running)
        return found[-1]

    async def until_connected(self, workers: int) -> None:
        await until(lambda: sum(self.front.router.connected(MODEL).values()) == workers)

    def start(self, **fields: Any) -> Running:
        opts = options(TOKENS, **{"ignore_eos": True, "return_token_ids": True, **fields})
        return Running(self.front.stub.Complete(completion(PROMPT, opts)), Answer())

    async def complete(self, tokens: int = 5, **fields: Any) -> Running:
        """Start a completion, and read its first tokens."""
        running = self.start(**fields)
        await running.read(tokens)
        return running


@contextlib.asynccontextmanager
async def places(text_model: TextModel, *configs: SimulatedConfig) -> AsyncIterator[Places]:
    async with contextlib.AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(worker(config)) for config in configs]
        addresses = [one.address for one in workers]
        front = await stack.enter_async_context(processor({MODEL: text_model}, addresses))
        here = Places(front, workers)
        yield here
        for one in here.workers:
            await one.until_idle()


def _went_on(answer: Answer) -> list[tuple[int, int, int]]:
    assert answer.finished is not None
    return [(each.way, each.reason, each.token_count) for each in answer.finished.redispatches]


WAYS = {
    "aggregated": (ONE, ONE),
    "handed off": (PREFILL, DECODE, DECODE),
    "in sequence": (replace(PREFILL, prefill_first=True), FIRST, FIRST),
}


@pytest.mark.parametrize("configs", WAYS.values(), ids=WAYS)
async def test_an_answer_goes_on_where_its_worker_was_lost(
    text_model: TextModel, configs: Sequence[SimulatedConfig]
) -> None:
    measured = Samples()
    async with places(text_model, *configs) as here:
        running = await here.complete()
        lost = await here.runs_at(configs[-1].role)
        await lost.server.stop(0)
        answer = await running.end()
        assert measured.grown("millstream_redispatches_total", model=MODEL, outcome="continue") == 1
        assert measured.grown("millstream_redispatches_total") == 1
        choice = answer.choices[0]
        assert choice.token_ids == counted(PROMPT[-1] + 1)
        assert choice.finish_reason == LENGTH
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (2, TOKENS)
        assert answer.usage.cached_tokens <= 2
        ((way, reason, tokens),) = _went_on(answer)
        assert (way, reason) == (CONTINUE, errors_pb2.ERROR_REASON_WORKER_LOST)
        assert 5 <= tokens < TOKENS


async def test_a_prefill_worker_is_lost_before_the_first_token(text_model: TextModel) -> None:
    async with places(text_model, SLOW, SLOW, DECODE) as here:
        running = here.start()
        lost = await here.runs_at(Role.PREFILL)
        (other,) = [one for one in here.workers[:2] if one is not lost]
        here.workers.remove(lost)
        await lost.server.stop(0)
        await other.until_running(1)
        await here.workers[-1].until_running(1)
        running.call.cancel()


async def test_a_prefill_worker_hangs_and_the_request_goes_on_elsewhere(
    text_model: TextModel,
) -> None:
    """Nobody is lost: decode waits for the cache as long as it may."""
    async with places(text_model, SLOW, replace(DECODE, handoff_wait_s=0.2), ONE) as here:
        answer = await here.start().end()
        assert answer.choices[0].token_ids == counted(PROMPT[-1] + 1)
        assert _went_on(answer) == [(AGAIN, errors_pb2.ERROR_REASON_KV_TRANSFER_FAILED, 0)]


async def test_text_and_its_stop_go_on_over_the_seam(text_model: TextModel) -> None:
    """Of n choices each; a stop string may begin before the loss and end behind it."""
    stop = text_model.decode(counted(PROMPT[-1] + 1)[40:80])
    async with places(text_model, ONE, ONE) as here:
        running = await here.complete(2 * 45, n=2, stop=[stop])
        lost = await here.runs_at()
        await lost.server.stop(0)
        answer = await running.end()
        for choice in answer.choices.values():
            assert choice.text == text_model.decode(counted(PROMPT[-1] + 1)[:40])
            assert choice.matched_stop
            assert choice.matched_stop.text == stop
        assert answer.usage.completion_tokens == 2 * 80
        assert answer.finished
        assert {each.index for each in answer.finished.redispatches} == {0, 1}


@pytest.mark.parametrize(
    "fields",
    [{"frequency_penalty": 1.0}, {"logprobs": sampling_pb2.LogprobOptions(top=2, prompt=True)}],
    ids=["told", "replayed"],
)
@pytest.mark.parametrize("configs", [WAYS["aggregated"], WAYS["handed off"]], ids=["one", "two"])
async def test_what_an_engine_keeps_besides_tokens_is_told_or_replayed(
    text_model: TextModel, configs: Sequence[SimulatedConfig], fields: dict[str, Any]
) -> None:
    async with places(text_model, *configs) as here:
        running = await here.complete(temperature=0.0, **fields)
        lost = await here.runs_at(configs[-1].role)
        await lost.server.stop(0)
        answer = await running.end()
        choice = answer.choices[0]
        assert choice.token_ids == counted(PROMPT[-1] + 1)
        if choice.logprobs:
            assert [each.token_id for each in choice.logprobs] == choice.token_ids
            assert [each.token_id for each in answer.prompt_logprobs] == PROMPT
        expected = REPLAY if choice.logprobs else WITH_STATE
        assert [way for way, _, _ in _went_on(answer)] == [expected]


async def test_other_weights_give_another_answer_so_the_loss_is_told(
    text_model: TextModel,
) -> None:
    async with places(text_model, ONE, replace(ONE, weight_version="2")) as here:
        running = await here.complete()
        lost = await here.runs_at()
        await lost.server.stop(0)
        told = await refusal(running.end())
        assert (told.code, told.reason) == (grpc.StatusCode.UNAVAILABLE, "WORKER_LOST")
        choice = running.answer.choices[0]
        assert choice.token_ids == counted(PROMPT[-1] + 1, choice.token_count)


async def test_a_request_that_loses_two_workers_goes_to_no_third(text_model: TextModel) -> None:
    async with places(text_model, ONE, ONE, ONE) as here:
        running = await here.complete()
        for _ in range(2):
            lost = await here.runs_at()
            await lost.server.stop(0)
            here.workers.remove(lost)
            await here.until_connected(len(here.workers))
        told = await refusal(running.end())
        assert (told.code, told.reason) == (grpc.StatusCode.ABORTED, "REPEATED_LOSS")
        assert not told.retryable
        again = await refusal(here.start().end())
        assert (again.code, again.reason) == (grpc.StatusCode.ABORTED, "REPEATED_LOSS")
        assert "an equal request" in again.message
        other = await here.start(temperature=0.5).end()
        assert other.choices[0].finish_reason == LENGTH


async def test_a_drain_hands_over_at_its_limit(text_model: TextModel) -> None:
    """However often: a restart of all workers, one after the other, is no loss."""
    async with places(text_model, ONE, ONE, ONE) as here:
        running = await here.complete()
        for left in (2, 1):
            leaving = await here.runs_at()
            await leaving.host.drain(0, 0.01)
            await leaving.server.stop(0)
            here.workers.remove(leaving)
            await here.until_connected(left)
        answer = await running.end()
        assert answer.choices[0].token_ids == counted(PROMPT[-1] + 1)
        assert [way for way, _, _ in _went_on(answer)] == [CONTINUE] * 2
