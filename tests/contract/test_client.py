"""The client library against a real Processor; the simulated model answers with the alphabet."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import grpc
import pytest

from millstream.v1 import generation_pb2
from millstream_client import (
    Client,
    InvalidRequestError,
    LogprobOptions,
    MessageTooLargeError,
    NotFoundError,
    RequestCancelledError,
    SamplingParams,
    SyncClient,
    assistant,
    system,
    user,
)
from millstream_server.processor.text.tokenizer import TextModel
from millstream_testing.in_process import (
    ALPHABET,
    MODEL,
    InProcessProcessor,
    InProcessWorker,
    suite,
)
from millstream_testing.waiting import until
from tests.support.clients.clients import KINDS, Kind

LENGTH = generation_pb2.FINISH_REASON_LENGTH
CANCELLED = generation_pb2.FINISH_REASON_CANCELLED
STEPPING = replace(ALPHABET, step_s=0.005)

both = pytest.mark.parametrize("kind", KINDS)


async def _nothing_runs(front: InProcessProcessor, one: InProcessWorker) -> None:
    await one.until_idle()
    await until(lambda: front.core.work.count == 0)


# ---- one answer


@both
async def test_a_question_is_answered(text_model: TextModel, kind: Kind) -> None:
    async with suite(text_model) as (front, one), kind.connect(front.address) as client:
        stream = client.chat("hi", request_id="mine", max_new_tokens=5)
        answer = await kind.run(stream.answer)
        assert (answer.text, answer.finish_reason, answer.complete) == ("ABCDE", LENGTH, True)
        assert (answer.request_id, answer.model, answer.turn) == ("mine", MODEL, 1)
        assert (answer.usage.completion_tokens, answer.choices[0].token_count) == (5, 5)
        assert stream.result is answer
        await _nothing_runs(front, one)


@both
async def test_a_client_names_its_request_itself(text_model: TextModel, kind: Kind) -> None:
    async with suite(text_model) as (front, _), kind.connect(front.address) as client:
        first, second = client.chat("hi", max_new_tokens=1), client.chat("hi", max_new_tokens=1)
        before = first.request_id
        assert len(before) == 32
        assert before != second.request_id
        assert (await kind.run(first.answer)).request_id == before


async def test_deltas_stream(text_model: TextModel) -> None:
    async with suite(text_model, STEPPING) as (front, _), Client(front.address) as client:
        deltas = [delta async for delta in client.chat("hi", max_new_tokens=30)]
        assert len(deltas) > 5
        assert "".join(delta.text for delta in deltas)[:26] == "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
        assert [delta.finish_reason for delta in deltas if delta.finish_reason] == [LENGTH]


async def test_deltas_stream_to_a_thread(text_model: TextModel) -> None:
    def read(address: str) -> list[str]:
        with SyncClient(address) as client:
            return [delta.text for delta in client.chat("hi", max_new_tokens=30)]

    async with suite(text_model, STEPPING) as (front, _):
        texts = await asyncio.to_thread(read, front.address)
        assert len(texts) > 5
        assert "".join(texts).startswith("ABCDEFGHIJKLMNOPQRSTUVWXYZ")


@both
async def test_a_whole_conversation_may_be_given(text_model: TextModel, kind: Kind) -> None:
    async with suite(text_model) as (front, _), kind.connect(front.address) as client:
        said = [user("hi"), assistant("ABC"), user("go on")]
        counted = await kind.run(client.tokenize, [system("Be short."), *said])
        assert counted.rendered_prompt.startswith("system:Be short.\nuser:hi\nassistant:ABC\n")
        stream = client.chat(said, system="Be short.", model=MODEL, max_new_tokens=2)
        answer = await kind.run(stream.answer)
        assert answer.usage.prompt_tokens == len(counted.token_ids)


@both
async def test_knobs_arrive(text_model: TextModel, kind: Kind) -> None:
    async with suite(text_model) as (front, _), kind.connect(front.address) as client:
        stream = client.chat(
            "hi",
            sampling=SamplingParams(max_new_tokens=4, temperature=0.5),
            max_new_tokens=8,
            n=2,
            stop="F",
            return_token_ids=True,
            logprobs=LogprobOptions(top=1, prompt=True),
            min_interval_s=0.01,
        )
        answer = await kind.run(stream.answer)
        assert [choice.text for choice in answer.choices] == ["ABCDE"] * 2
        first = answer.choices[0]
        assert first.matched_stop is not None
        assert first.matched_stop.text == "F"
        assert len(first.token_ids) == len(first.logprobs) == first.token_count == 6
        assert len(answer.prompt_logprobs) == answer.usage.prompt_tokens


@both
async def test_a_prompt_is_completed_from_text_or_ids(text_model: TextModel, kind: Kind) -> None:
    async with suite(text_model) as (front, _), kind.connect(front.address) as client:
        ids = (await kind.run(client.tokenize, "say @", special_tokens=False)).token_ids
        for prompt in ("say @", list(ids)):
            stream = client.complete(prompt, max_new_tokens=3)
            answer = await kind.run(stream.answer)
            assert (answer.text, answer.finish_reason, answer.turn) == ("ABC", LENGTH, 0)
        assert await kind.run(client.detokenize, ids) == "say @"


@both
async def test_models_and_health(text_model: TextModel, kind: Kind) -> None:
    async with suite(text_model) as (front, one), kind.connect(front.address) as client:
        (model,) = await kind.run(client.models)
        assert (model.name, model.ready, model.chat) == (MODEL, True, True)
        assert await kind.run(client.health) is True
        await one.server.stop(0)

        async def unhealthy() -> bool:
            return not await kind.run(client.health)

        await until(unhealthy)
        await front.server.stop(0)
        assert await kind.run(client.health, timeout_s=1.0) is False


# ---- failures


@both
async def test_what_is_wrong_with_a_request_is_told(text_model: TextModel, kind: Kind) -> None:
    async with suite(text_model) as (front, _), kind.connect(front.address) as client:
        failed = await kind.failure(client.chat("hi", top_p=2.0, request_id="mine").answer)
        assert type(failed) is InvalidRequestError
        assert (failed.code, failed.reason) == (
            grpc.StatusCode.INVALID_ARGUMENT,
            "INVALID_REQUEST",
        )
        (violation,) = failed.violations
        assert violation.field == "start.options.sampling.top_p"
        assert (failed.retryable, failed.request_id, failed.partial) == (False, "mine", None)
        assert isinstance(failed.__cause__, grpc.RpcError)
        assert "INVALID_ARGUMENT (INVALID_REQUEST)" in str(failed)
        assert "start.options.sampling.top_p" in str(failed)
        assert str(failed).endswith("request mine")

        failed = await kind.failure(client.tokenize, "hi", model="other")
        assert type(failed) is NotFoundError
        assert failed.reason == "MODEL_NOT_FOUND"


@both
async def test_a_message_over_the_limit_is_no_overload(text_model: TextModel, kind: Kind) -> None:
    async with suite(text_model) as (front, _), kind.connect(front.address) as client:
        failed = await kind.failure(client.chat("x" * (5 << 20)).answer)
        assert type(failed) is MessageTooLargeError
        assert failed.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert failed.retryable is False


# ---- leaving


async def _aclose(stream: Any) -> None:
    await stream.aclose()


async def _drop(stream: Any) -> None:
    """The caller's last reference goes with this frame."""


@pytest.mark.parametrize("leave", [_aclose, _drop])
@pytest.mark.parametrize("what", ["chat", "complete", "turn"])
async def test_leaving_a_stream_early_ends_its_call(
    text_model: TextModel, leave: Callable[[Any], Any], what: str
) -> None:
    async with suite(text_model, STEPPING) as (front, one), Client(front.address) as client:
        conversation = client.conversation(max_new_tokens=400)
        stream: Any = {
            "chat": lambda: client.chat("hi", max_new_tokens=400),
            "complete": lambda: client.complete("hi", max_new_tokens=400),
            "turn": lambda: conversation.say("hi"),
        }[what]()
        assert (await anext(stream)).text
        await one.until_running(1)
        gc.disable()  # Reference counting alone must do.
        try:
            await leave(stream)
            stream = None
            await _nothing_runs(front, one)
        finally:
            gc.enable()


@pytest.mark.parametrize("by", ["close", "drop"])
async def test_a_thread_that_leaves_a_stream_early_ends_its_call(
    text_model: TextModel, by: str
) -> None:
    kind = Kind(SyncClient)
    async with suite(text_model, STEPPING) as (front, one), kind.connect(front.address) as client:
        stream = client.chat("hi", max_new_tokens=400)
        assert (await kind.next(stream)).text
        if by == "close":
            await kind.close(stream)
        del stream
        await _nothing_runs(front, one)


@pytest.mark.parametrize("prefill_s", [0.0, 60.0], ids=["answering", "in prefill"])
@pytest.mark.parametrize("what", ["chat", "complete", "turn"])
async def test_cancelling_the_task_ends_the_call(
    text_model: TextModel, what: str, prefill_s: float
) -> None:
    config = replace(STEPPING, prefill_s_per_token=prefill_s)
    async with suite(text_model, config) as (front, one), Client(front.address) as client:
        conversation = client.conversation(max_new_tokens=400)
        stream = {
            "chat": lambda: client.chat("hi", max_new_tokens=400),
            "complete": lambda: client.complete("hi", max_new_tokens=400),
            "turn": lambda: conversation.say("hi"),
        }[what]()
        task = asyncio.ensure_future(stream.answer())
        await one.until_running(1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await _nothing_runs(front, one)


@both
async def test_a_stream_may_be_cancelled_from_elsewhere(text_model: TextModel, kind: Kind) -> None:
    config = replace(ALPHABET, prefill_s_per_token=60.0)
    async with suite(text_model, config) as (front, one), kind.connect(front.address) as client:
        stream = client.chat("hi")
        reading = asyncio.ensure_future(kind.failure(stream.answer))
        await one.until_running(1)
        stream.cancel()
        failed = await reading
        assert type(failed) is RequestCancelledError
        assert (failed.code, failed.partial) == (grpc.StatusCode.CANCELLED, None)
        await _nothing_runs(front, one)


@both
@pytest.mark.parametrize("what", ["chat", "turn"])
async def test_closing_the_client_ends_what_runs(
    text_model: TextModel, kind: Kind, what: str
) -> None:
    config = replace(ALPHABET, prefill_s_per_token=60.0)
    async with suite(text_model, config) as (front, one), kind.connect(front.address) as client:
        stream = client.chat("hi") if what == "chat" else client.conversation().say("hi")
        reading = asyncio.ensure_future(kind.failure(stream.answer))
        await one.until_running(1)
        await kind.run(client.close)
        failed = await reading
        assert type(failed) is RequestCancelledError
        assert (failed.code, failed.retryable) == (grpc.StatusCode.CANCELLED, False)
        await _nothing_runs(front, one)
