"""A diffusion language model behind one kind of server: a worker, or a Processor's Chat."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from millstream.v1 import diffusion_pb2, generation_pb2, processor_pb2, sampling_pb2, worker_pb2
from millstream_server.generation.validation import REFUSED_IN_DIFFUSION
from millstream_server.processor.text.tokenizer import TextModel
from millstream_testing.in_process import MODEL, InProcessWorker, processor, suite, worker
from millstream_testing.waiting import until
from tests.support.processor.chats import (
    CANCEL,
    Conversation,
    chat,
    completion,
    gather,
    options,
    start,
)
from tests.support.processor.starts import kept_starts
from tests.support.wire.failures import refusal
from tests.support.worker.text_diffusion import DLLM, STEPPING, serving
from tests.support.worker.worker_streams import text_stream

STOP = generation_pb2.FINISH_REASON_STOP
LENGTH = generation_pb2.FINISH_REASON_LENGTH
NOWHERE = "127.0.0.1:1"
TRACEPARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


# ---- a worker


async def test_a_worker_says_what_it_refuses() -> None:
    async with worker(DLLM) as one:
        info = (await one.about.GetWorkerInfo(worker_pb2.GetWorkerInfoRequest())).info
    assert info.role == worker_pb2.WORKER_ROLE_DIFFUSION
    assert list(info.refused_fields) == sorted(REFUSED_IN_DIFFUSION)
    assert not info.abilities


@pytest.mark.parametrize("method", ["GenerateImage", "GenerateVideo"])
async def test_a_worker_that_makes_text_makes_nothing_else(method: str) -> None:
    async with worker(DLLM) as one:
        failed = await refusal(getattr(one.diffusion, method)())
    assert failed.code is grpc.StatusCode.UNIMPLEMENTED
    assert failed.reason == "UNSUPPORTED_FEATURE"
    assert "makes text" in failed.message


# ---- Chat and Complete


async def test_chat_and_complete_work_as_with_any_model(text_model: TextModel) -> None:
    """Its generation_config.json sets temperature, top_p and top_k: nothing that a client asked."""
    assert text_model.generation_defaults.temperature == 0.7
    async with suite(text_model, DLLM) as (front, one):
        answer = await chat(front.stub, "hi", opts=options(9, n=2))
        assert [choice.text for choice in answer.choices.values()] == ["ABCDEFGHI"] * 2
        assert answer.finish_reason == LENGTH
        assert answer.usage.completion_tokens == 18
        continued = await gather(front.stub.Complete(completion([40, 41], options(5))))
        assert continued.choices[0].token_count == 5
        await one.until_idle()


async def test_a_stop_string_inside_a_block_cuts_the_text(text_model: TextModel) -> None:
    async with suite(text_model, STEPPING) as (front, one):
        answer = await chat(front.stub, "hi", opts=options(400, stop=["FG"]))
        assert answer.text == "ABCDE"
        assert answer.finish_reason == STOP
        await one.until_idle()


async def test_a_cancelled_chat_frees_the_worker(text_model: TextModel) -> None:
    async with suite(text_model, STEPPING) as (front, one):
        conversation = Conversation(front.stub)
        await conversation.say(start("hi", opts=options(400)))
        await conversation.read()
        await conversation.say(CANCEL)
        answer = await conversation.answer()
        assert answer.finish_reason == generation_pb2.FINISH_REASON_CANCELLED
        await one.until_idle()
        await conversation.end()


async def test_list_models_tells_of_its_workers(text_model: TextModel) -> None:
    async with suite(text_model, DLLM) as (front, _):
        (model,) = (await front.stub.ListModels(processor_pb2.ListModelsRequest())).models
    assert model.ready
    (workers,) = model.workers
    assert workers.role == worker_pb2.WORKER_ROLE_DIFFUSION
    assert workers.connected == 1


_FIELDS: dict[str, dict[str, Any]] = {
    "start.options.sampling.seed": {"seed": 3},
    "start.options.sampling.temperature": {"temperature": 0.5},
    "start.options.sampling.constraint": {
        "constraint": sampling_pb2.Constraint(json_schema='{"type": "object"}')
    },
    "start.options.logprobs": {"logprobs": sampling_pb2.LogprobOptions(prompt=True)},
}


@pytest.mark.parametrize("field", _FIELDS)
async def test_a_chat_that_asks_for_more_is_refused_by_the_clients_path(
    text_model: TextModel, field: str
) -> None:
    async with suite(text_model, DLLM) as (front, one):
        with kept_starts() as starts:
            conversation = Conversation(front.stub)
            await conversation.say(start("hi", opts=options(4, **_FIELDS[field])))
            failed = await refusal(conversation.end())
            assert failed.code is grpc.StatusCode.INVALID_ARGUMENT
            assert failed.reason == "UNSUPPORTED_FEATURE"
            assert failed.fields == (field,)
            greedy = options(4, temperature=0.0)
            assert (await chat(front.stub, "hi", opts=greedy)).text == "ABCD"
        assert len(starts) == 1, "the refused one never reached the worker"
        await one.until_idle()


# ---- GenerateText at a Processor


async def test_a_model_that_is_no_diffusion_model_is_refused(text_model: TextModel) -> None:
    async with (
        worker() as one,
        processor({MODEL: text_model}, [one.address]) as front,
    ):
        stream = text_stream(front.diffusion)
        await stream.start(0, [1], model=MODEL)
        await stream.start(1, [1], model="other")
        await stream.start(2, [1])
        wrong, unknown, unnamed = await stream.ended(0, 1, 2)
    assert (wrong.reason, wrong.fields) == ("UNSUPPORTED_FEATURE", ["model"])
    assert wrong.error is not None
    assert wrong.error.message == f"model: {MODEL!r} is no diffusion language model: it chats"
    assert unknown.reason == "MODEL_NOT_FOUND"
    assert (unnamed.reason, unnamed.fields) == ("INVALID_REQUEST", ["model"])
    assert unnamed.error is not None
    assert unnamed.error.message == "model: no model here makes text of token ids"


async def test_the_only_diffusion_model_needs_no_name(text_model: TextModel) -> None:
    models = {MODEL: text_model, "autoregressive": text_model}
    async with (
        worker(DLLM) as one,
        processor(models, [one.address]) as front,
    ):
        stream = text_stream(front.diffusion)
        await stream.start(0, [1], max_new_tokens=3)
        await stream.start(1, [1], max_new_tokens=3, model=MODEL)
        views = await stream.ended(0, 1)
    assert [view.token_ids for view in views] == [[2, 3, 4]] * 2


async def test_a_request_carries_its_trace_and_its_time_to_the_worker(
    text_model: TextModel,
) -> None:
    with kept_starts() as starts:
        async with serving("processor", text_model) as at:
            stream = text_stream(at.stub)
            start_ = generation_pb2.StartGeneration(token_ids=[1], request_id="r-1")
            start_.sampling.max_new_tokens = 2
            start_.trace.traceparent = TRACEPARENT
            start_.timeout.FromSeconds(60)
            await stream.call.write(diffusion_pb2.GenerateTextRequest(start=start_))
            await stream.ended(0)
    ((_, request),) = starts
    assert request.request_id == "r-1"
    assert request.trace.traceparent == TRACEPARENT
    assert request.time_left_s is not None
    assert 30 < request.time_left_s <= 60


async def test_a_worker_that_goes_away_costs_one_retryable_error(text_model: TextModel) -> None:
    async with (
        worker(STEPPING) as one,
        worker(STEPPING) as two,
        processor({MODEL: text_model}, [one.address, two.address]) as front,
    ):
        stream = text_stream(front.diffusion)
        await stream.start(0, [1], max_new_tokens=400)
        await stream.start(1, [1], max_new_tokens=400)
        await stream.first_token(0)
        await stream.first_token(1)
        await one.server.stop(0)
        views = await stream.ended(0, 1)
        lost = [view for view in views if view.error is not None]
        assert [view.reason for view in lost] == ["WORKER_LOST"]
        assert [len(view.token_ids) for view in views if view.finish is not None] == [400]


@pytest.mark.parametrize("losses", [1, 2])
async def test_a_request_without_a_token_starts_again_once(
    text_model: TextModel, losses: int
) -> None:
    """Its workers hang, and go away."""
    async with (
        worker(STEPPING) as one,
        worker(STEPPING) as two,
        processor({MODEL: text_model}, [one.address, two.address]) as front,
    ):
        left = [one, two]
        for each in left:
            each.engine.wedge()
        stream = text_stream(front.diffusion)
        await stream.start(0, [1], max_new_tokens=40)
        for _ in range(losses):
            lost = await _running(left)
            left.remove(lost)
            await lost.server.stop(0)
        for each in left:
            each.engine.unwedge()
        (view,) = await stream.ended(0)
    if losses > 1:
        assert view.reason == "REPEATED_LOSS"
    else:
        assert (view.error, len(view.token_ids)) == (None, 40)


async def _running(workers: list[InProcessWorker]) -> InProcessWorker:
    """Return the worker that has a request."""
    found: list[InProcessWorker] = []

    async def running() -> bool:
        found.extend([each for each in workers if (await each.engine.load()).running_requests])
        return bool(found)

    await until(running)
    return found[0]


async def test_a_processor_that_shuts_down_lets_requests_finish(text_model: TextModel) -> None:
    async with (
        suite(text_model, STEPPING) as (front, _),
    ):
        stream = text_stream(front.diffusion)
        await stream.start(0, [1], max_new_tokens=100)
        await stream.first_token(0)
        draining = asyncio.ensure_future(front.core.work.drain(0.0, 20.0))
        await stream.until(lambda: stream.frames[-1].draining)
        late = text_stream(front.diffusion)
        await late.start(0, [1], max_new_tokens=4)
        (refused,) = await late.ended(0)
        (view,) = await stream.ended(0)
        assert await draining
    assert len(view.token_ids) == 100
    assert refused.reason == "WORKER_DRAINING"
