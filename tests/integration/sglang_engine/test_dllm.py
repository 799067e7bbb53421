"""A diffusion language model on real SGLang: a worker, a Processor before it, and a bare engine."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from millstream.v1 import (
    diffusion_pb2_grpc,
    generation_pb2,
    processor_pb2,
    processor_pb2_grpc,
    sampling_pb2,
    worker_pb2,
    worker_pb2_grpc,
)
from tests.support.models.dllm_models import BLOCK_TOKENS, CONTEXT_LENGTH
from tests.support.processes import forked
from tests.support.processes.suite import ServiceProcess, running
from tests.support.processor.chats import chat, message, options, until_connected
from tests.support.wire.failures import failure
from tests.support.wire.long_streams import NOT_SERVING, SERVING, load_of, watched_health
from tests.support.worker.kv_watch import told
from tests.support.worker.worker_streams import SlotView, text_stream

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(400)]

MODEL = "sdar"
KV_TOKENS = 768
"""Less than two of the longest requests need."""
GENERATE_TEXT = "millstream.v1.DiffusionService"
SCHEMA = '{"type": "object"}'


def _prompt(length: int) -> list[int]:
    return [20 + (length * 31 + 7 * index) % 900 for index in range(length)]


# Prompts that fill blocks and others, lengths that do and others, and stop tokens that come soon.
_SHAPES = [(1, 7), (3, 16), (4, 17), (5, 24), (20, 1), (63, 9), (200, 12)]
CASES: list[tuple[list[int], int, list[int]]] = [
    (_prompt(length), new, []) for length, new in _SHAPES
] + [(_prompt(length), 40, list(range(256))) for length in (2, 8, 33)]


@dataclass
class Suite:
    """A worker and a Processor."""

    model: Path
    logs: Path
    worker: ServiceProcess
    front: ServiceProcess


def _service(model: Path, logs: Path, name: str, **flags: object) -> ServiceProcess:
    """Make a worker, or a Processor if it has workers."""
    if "workers" in flags:
        module, given = "processor", {"models": f"{MODEL}={model}", **flags}
    else:
        module = "diffusion"
        given = {
            "kind": "text",
            "model_path": model,
            "model_name": MODEL,
            "dllm_algorithm": "LowConfidence",
            "max_total_tokens": KV_TOKENS,
            **flags,
        }
    return ServiceProcess(f"millstream_server.{module}", given, logs / f"{name}.log")


@pytest.fixture(scope="module")
def suite(
    dllm_model: Path, expected_text: list[Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Suite]:
    del expected_text  # asked for so that the bare engine has come and gone first
    logs = tmp_path_factory.mktemp("dllm-logs")
    probed = {"canary_interval_s": 0.5, "canary_timeout_s": 1.5}
    worker = _service(dllm_model, logs, "worker", **probed)
    front = _service(dllm_model, logs, "front", workers=worker.address)
    with running(worker, front):
        yield Suite(dllm_model, logs, worker, front)


@pytest.fixture(scope="module")
def expected_text(dllm_model: Path) -> list[Any]:
    """What a bare engine answers to `CASES`, one after the other, with SGLang's own defaults."""
    cases = [
        {
            "input_ids": ids,
            "sampling_params": {"temperature": 0, "max_new_tokens": new, "stop_token_ids": stop},
        }
        for ids, new, stop in CASES
    ]
    done = forked.run(
        "sglang", "tests.support.engines.bare_sglang", "denoise", str(dllm_model), json.dumps(cases)
    )
    assert done.returncode == 0, done.stderr[-4000:]
    answers = json.loads(done.stdout)
    # A model that answers everything alike would make the comparison worthless.
    assert len({tuple(answer["token_ids"]) for answer in answers}) == len(CASES)
    assert {answer["finish"]["type"] for answer in answers} == {"length", "stop"}
    return answers  # type: ignore[no-any-return]


@contextlib.asynccontextmanager
async def _text(service: ServiceProcess) -> AsyncIterator[Any]:
    async with grpc.aio.insecure_channel(service.address) as channel:
        yield diffusion_pb2_grpc.DiffusionServiceStub(channel)


async def _idle(suite: Suite) -> None:
    async with load_of(suite.worker.address) as load:
        await load.idle(10)


def _check(view: SlotView, prompt: list[int], answer: dict[str, Any]) -> None:
    assert view.token_ids == answer["token_ids"]
    assert view.finish is not None
    finish = answer["finish"]
    assert view.finish.reason == generation_pb2.FinishReason.Value(
        f"FINISH_REASON_{finish['type'].upper()}"
    )
    if finish["type"] == "stop":
        assert view.finish.matched_token_id == finish["matched"] == view.token_ids[-1]
    assert view.finish.usage.prompt_tokens == len(prompt)
    assert view.finish.usage.completion_tokens == len(view.token_ids)


async def test_all_at_once_equal_the_bare_engine_token_for_token(
    suite: Suite, expected_text: list[Any]
) -> None:
    async with _text(suite.worker) as stub:
        stream = text_stream(stub)
        for slot, (ids, new, stop) in enumerate(CASES):
            await stream.start(slot, ids, max_new_tokens=new, stop_token_ids=stop)
        views = await stream.ended(*range(len(CASES)))
        await stream.drain()
    for view, (ids, _, _), answer in zip(views, CASES, expected_text, strict=True):
        _check(view, ids, answer)
    await _idle(suite)


async def test_tokens_come_block_by_block(suite: Suite) -> None:
    lengths: set[int] = set()
    async with _text(suite.worker) as stub:
        stream = text_stream(stub)
        await stream.start(0, _prompt(6), max_new_tokens=33, ignore_eos=True)
        while not stream.slots[0].terminals:
            assert await stream.read()
            lengths.add(len(stream.slots[0].token_ids))
    assert lengths - {33} <= set(range(2, 33, BLOCK_TOKENS))
    assert len(lengths) > 4
    answered = [*_prompt(6), *stream.slots[0].token_ids]
    await told(suite.worker.address, answered, BLOCK_TOKENS)


async def test_chat_through_the_processor(suite: Suite) -> None:
    async with (
        grpc.aio.insecure_channel(suite.front.address) as channel,
        _text(suite.worker) as text,
    ):
        stub = processor_pb2_grpc.ProcessorServiceStub(channel)
        conversation = processor_pb2.Conversation(messages=[message("hello there")])
        prompt = await stub.Tokenize(processor_pb2.TokenizeRequest(conversation=conversation))
        answer = await chat(
            stub, "hello there", opts=options(18, return_token_ids=True, n=2, ignore_eos=True)
        )
        stream = text_stream(text)
        await stream.start(0, prompt.token_ids, max_new_tokens=18, ignore_eos=True)
        (view,) = await stream.ended(0)
    assert [choice.token_ids for choice in answer.choices.values()] == [view.token_ids] * 2
    assert len(view.token_ids) == 18
    assert answer.text
    assert answer.usage.prompt_tokens == len(prompt.token_ids)
    assert answer.usage.completion_tokens == 36


async def test_a_cancel_frees_the_engine(suite: Suite) -> None:
    async with _text(suite.worker) as stub:
        stream = text_stream(stub)
        for slot in range(3):
            await stream.start(slot, _prompt(9 + slot), max_new_tokens=400, ignore_eos=True)
        await stream.first_token(0)
        async with load_of(suite.worker.address) as load:
            await load.until(lambda report: report.running_requests >= 1, 10)
        for slot in range(3):  # the third waits for the KV cache of the others
            await stream.cancel(slot)
        views = await stream.ended(0, 1, 2)
        for view in views:
            assert view.finish is not None
            assert view.finish.reason == generation_pb2.FINISH_REASON_CANCELLED
            assert view.finish.usage.completion_tokens == len(view.token_ids) < 400
        assert views[2].token_ids == []
        await _idle(suite)


async def test_more_than_the_kv_cache_holds_runs_one_after_another(suite: Suite) -> None:
    """SGLang's scheduler would end."""
    async with _text(suite.worker) as stub:
        stream = text_stream(stub)
        for slot in range(6):
            await stream.start(slot, _prompt(150 + slot), max_new_tokens=75, ignore_eos=True)
        views = await stream.ended(*range(6))
    assert [len(view.token_ids) for view in views] == [75] * 6
    await _idle(suite)


async def test_the_promised_context_can_be_used(suite: Suite) -> None:
    async with grpc.aio.insecure_channel(suite.worker.address) as channel:
        about = worker_pb2_grpc.WorkerServiceStub(channel)
        info = (await about.GetWorkerInfo(worker_pb2.GetWorkerInfoRequest())).info
    assert CONTEXT_LENGTH - 8 <= info.context_length <= CONTEXT_LENGTH
    assert info.block_size == BLOCK_TOKENS
    room = info.context_length - 420
    async with _text(suite.worker) as stub:
        stream = text_stream(stub)
        await stream.start(0, _prompt(420), max_new_tokens=room, ignore_eos=True)
        (view,) = await stream.ended(0)
    assert len(view.token_ids) == room


async def test_a_grammar_never_reaches_the_engine(suite: Suite) -> None:
    """There it would run for ever, and hold the engine's weights and cache."""
    constraint = sampling_pb2.Constraint(json_schema=SCHEMA)
    async with (
        grpc.aio.insecure_channel(suite.front.address) as channel,
        _text(suite.worker) as text,
    ):
        stream = text_stream(text)
        await stream.start(0, _prompt(5), max_new_tokens=8, constraint=constraint)
        (view,) = await stream.ended(0)
        assert (view.reason, view.fields) == ("UNSUPPORTED_FEATURE", ["sampling.constraint"])
        stub = processor_pb2_grpc.ProcessorServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await chat(stub, "hi", opts=options(8, constraint=constraint))
        assert failure(caught.value).fields == ("start.options.sampling.constraint",)
        await _idle(suite)
        await stream.start(1, _prompt(5), max_new_tokens=8)
        (healthy,) = await stream.ended(1)
        assert healthy.finish is not None


async def test_the_canary_notices_an_engine_that_hangs(suite: Suite) -> None:
    # All of the engine's processes: a forked one doesn't always have SGLang's title.
    engine = psutil.Process(suite.worker.pid).children(recursive=True)
    assert engine
    async with (
        grpc.aio.insecure_channel(suite.worker.address) as channel,
        watched_health(channel, GENERATE_TEXT) as (health,),
    ):
        for process in engine:
            process.suspend()
        try:
            await health.until(NOT_SERVING, 30)
        finally:
            for process in engine:
                process.resume()
        await health.until(SERVING, 30)
    async with grpc.aio.insecure_channel(suite.front.address) as channel, asyncio.timeout(60):
        stub = processor_pb2_grpc.ProcessorServiceStub(channel)
        while True:  # the Processor's link learns it a moment later
            with contextlib.suppress(grpc.aio.AioRpcError):
                assert (await chat(stub, "hi", opts=options(4))).usage.completion_tokens
                break


async def test_what_a_killed_worker_ran_begins_again_elsewhere(suite: Suite) -> None:
    other = _service(suite.model, suite.logs, "other")
    both = f"{suite.worker.address},{other.address}"
    front = _service(suite.model, suite.logs, "front-both", workers=both)
    opts = options(18, return_token_ids=True, ignore_eos=True)
    with running(other, front):
        async with grpc.aio.insecure_channel(front.address) as channel:
            stub = processor_pb2_grpc.ProcessorServiceStub(channel)
            await until_connected(stub, 2)
            before = await chat(stub, "hello there", opts=opts)
            for process in psutil.Process(other.pid).children(recursive=True):
                process.suspend()
            asked = [asyncio.ensure_future(chat(stub, "hello there", opts=opts)) for _ in range(3)]
            await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
            other.kill()
            answers = await asyncio.gather(*asked)
    ways = set()
    for answer in answers:
        assert answer.finished
        assert answer.choices[0].token_ids == before.choices[0].token_ids
        ways |= {each.way for each in answer.finished.redispatches}
    assert ways == {processor_pb2.REDISPATCH_WAY_AGAIN}
