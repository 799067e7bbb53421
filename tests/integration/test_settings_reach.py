"""Settings of real processes have their effect."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import pytest

from millstream.v1 import decode_pb2_grpc, processor_pb2, processor_pb2_grpc
from millstream_testing.waiting import until
from tests.support.processes.simulated_suite import SimulatedSuite
from tests.support.processes.suite import ServiceProcess
from tests.support.processor.chats import (
    CANCEL,
    Conversation,
    completion,
    gather,
    options,
    start,
    user_turn,
)
from tests.support.wire.failures import Failure, failure, refusal
from tests.support.worker.worker_streams import SlotView, decode_stream

pytestmark = pytest.mark.timeout(90)

STREAMS, QUEUED, REQUEST_TOKENS = 4, 1, 450
OPEN_BYTES, MESSAGE_BYTES = 128 * REQUEST_TOKENS, 256 * REQUEST_TOKENS
WORKER_REQUESTS, WORKER_TOKENS = 3, 50
AGE_S, GRACE_S = 1.5, 3.0
KEY = "k" * 32
LONG = 400
"""Tokens of an answer that takes 8 s."""
PROMPT_CHARACTER = 40


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimulatedSuite]:
    """A worker and two Processors on it: one with little room, one closed, with an age."""
    made = SimulatedSuite(tmp_path_factory.mktemp("suite"))
    made.add_worker(
        "worker",
        simulated_step_s=0.02,
        max_open_requests=WORKER_REQUESTS,
        max_open_tokens=WORKER_TOKENS,
    )
    made.add_processor(
        "narrow",
        max_open_streams=STREAMS,
        max_open_bytes=OPEN_BYTES,
        max_receive_bytes=MESSAGE_BYTES,
        max_admitted_requests=1,
        max_queued_requests=QUEUED,
    )
    closed = made.add_processor("closed", max_connection_age_s=AGE_S)
    closed.env = {
        **closed.env,
        "MILLSTREAM_API_KEYS": f"alice:{KEY}",
        "MILLSTREAM_DRAINS": "5",
        "MILLSTREAM_PROCESSOR_SERVICE_HOST": "10.0.0.1",  # as Kubernetes sets it
        "MILLSTREAM_WEIGHTS_DIRS": "/",  # workers read it
        "MILLSTREAM_XYZZY": "1",
    }
    with made.running():
        yield made


@contextlib.asynccontextmanager
async def _stub(service: ServiceProcess) -> AsyncIterator[Any]:
    async with grpc.aio.insecure_channel(service.address) as channel:
        yield processor_pb2_grpc.ProcessorServiceStub(channel)


def test_variables_that_no_program_reads_are_one_warning(suite: SimulatedSuite) -> None:
    told = "variables that no program reads"
    lines = suite.services["closed"].log.read_text().splitlines()
    assert [line.partition(told)[2] for line in lines if told in line and " WARNING " in line] == [
        ' variables="MILLSTREAM_DRAINS (did you mean MILLSTREAM_DRAIN_S?), MILLSTREAM_XYZZY"'
    ]


def _tokenize(stub: Any, text: str = "a", **call: Any) -> Any:
    return stub.Tokenize(processor_pb2.TokenizeRequest(text=text), **call)


def _complete(stub: Any, max_new_tokens: int) -> Any:
    return stub.Complete(completion("hi", options(max_new_tokens)))


async def _chat(stub: Any, max_new_tokens: int, **call: Any) -> Conversation:
    conversation = Conversation(stub, **call)
    await conversation.say(start("hi", opts=options(max_new_tokens)))
    return conversation


def _is_overloaded(failed: Failure, why: str) -> None:
    assert (failed.code, failed.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "OVERLOADED")
    assert why in failed.message
    assert failed.retryable
    assert failed.retry_delay_s is not None


# ---- how much is let in --------------------------------------------------------------------------


async def test_a_processor_holds_so_many_rpcs(suite: SimulatedSuite) -> None:
    async with _stub(suite.services["narrow"]) as stub:
        held: list[Conversation] = []
        for _ in range(STREAMS):
            held.append(await _chat(stub, 1))
            await held[-1].answer()
        _is_overloaded(await refusal(_tokenize(stub)), "RPCs are open")
        for conversation in held:
            await conversation.end()
        assert (await _tokenize(stub)).token_ids


async def test_a_processor_holds_so_many_bytes(suite: SimulatedSuite) -> None:
    async with _stub(suite.services["narrow"]) as stub:
        assert (await _tokenize(stub, "x" * (OPEN_BYTES // 2))).token_ids
        _is_overloaded(await refusal(_tokenize(stub, "x" * OPEN_BYTES)), "fill its memory")
        failed = await refusal(_tokenize(stub, "x" * MESSAGE_BYTES))
        assert (failed.code, failed.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "")
        assert str(MESSAGE_BYTES) in failed.message


async def test_a_processor_runs_and_queues_so_much(suite: SimulatedSuite) -> None:
    async with _stub(suite.services["narrow"]) as stub:
        failed = await refusal(_complete(stub, REQUEST_TOKENS))
        assert failed.code is grpc.StatusCode.INVALID_ARGUMENT
        assert f"more than {REQUEST_TOKENS}, the most of one request" in failed.message

        running = await _chat(stub, LONG)
        await running.read()
        # Of two more one waits, whichever comes first, and the other is refused.
        two = [asyncio.ensure_future(gather(_complete(stub, 2))) for _ in range(QUEUED + 1)]
        (refused,), (waits,) = await asyncio.wait(two, return_when=asyncio.FIRST_COMPLETED)
        error = refused.exception()
        assert error is not None, "both waited"
        _is_overloaded(failure(error), f"the queue is full ({QUEUED} waiting)")
        await running.say(CANCEL)
        assert (await waits).usage.completion_tokens == 2
        await running.end()


async def test_a_worker_holds_so_many_requests_and_prompt_tokens(suite: SimulatedSuite) -> None:
    async with grpc.aio.insecure_channel(suite.services["worker"].address) as channel:
        stream = decode_stream(decode_pb2_grpc.DecodeServiceStub(channel))

        async def begin(slot: int, prompt: int) -> None:
            await stream.start(slot, [PROMPT_CHARACTER] * prompt, max_new_tokens=LONG)

        async def refused(slot: int, prompt: int) -> str:
            await begin(slot, prompt)
            (view,) = await stream.ended(slot)
            return _overloaded_slot(view)

        await begin(0, WORKER_TOKENS - 10)
        assert f"the {WORKER_TOKENS} that may be open" in await refused(1, 11)
        for slot in range(1, WORKER_REQUESTS):
            await begin(slot, 1)
        assert f"{WORKER_REQUESTS} requests are open" in await refused(WORKER_REQUESTS, 1)

        for slot in range(WORKER_REQUESTS):
            assert not stream.slots[slot].terminals
            await stream.cancel(slot)
        await stream.ended(*range(WORKER_REQUESTS))
        await stream.drain()


def _overloaded_slot(view: SlotView) -> str:
    assert view.reason == "OVERLOADED"
    assert view.error is not None
    assert view.error.HasField("retry_delay")
    return view.error.message


# ---- who may call --------------------------------------------------------------------------------


def _bearer(key: str) -> dict[str, Any]:
    return {"metadata": (("authorization", f"Bearer {key}"),)}


async def test_keys_in_the_environment_alone_close_a_processor(suite: SimulatedSuite) -> None:
    async with _stub(suite.services["closed"]) as stub:
        wrong = _tokenize(stub, **_bearer("w" * 32))
        for call in (_tokenize(stub), wrong, Conversation(stub).call):
            failed = await refusal(call)
            assert failed.code is grpc.StatusCode.UNAUTHENTICATED
            assert failed.reason == "UNAUTHENTICATED"
            assert "API key" in failed.message
            assert not failed.retryable
        assert (await _tokenize(stub, **_bearer(KEY))).token_ids


# ---- how long ------------------------------------------------------------------------------------


async def test_a_connection_to_a_processor_has_an_age_and_one_to_a_worker_none(
    suite: SimulatedSuite,
) -> None:
    ready = grpc.ChannelConnectivity.READY
    worker, closed = (suite.services[name].address for name in ("worker", "closed"))
    async with grpc.aio.insecure_channel(worker) as other, grpc.aio.insecure_channel(closed) as own:
        await asyncio.wait_for(other.channel_ready(), 10)
        stub = processor_pb2_grpc.ProcessorServiceStub(own)
        conversation = await _chat(stub, 1, **_bearer(KEY))
        await conversation.answer()

        await until(lambda: own.get_state() is not ready, 3 * AGE_S)
        assert (await _tokenize(stub, **_bearer(KEY))).token_ids, "on a connection of its own"
        await conversation.say(user_turn("go on"))
        assert (await conversation.answer(2)).usage.completion_tokens == 1

        async with asyncio.timeout(3 * GRACE_S):
            cut = await refusal(conversation.call)
        assert cut.code is grpc.StatusCode.UNAVAILABLE
        assert (cut.reason, cut.retryable) == ("UNAVAILABLE", True)
        assert "--max-connection-age-s" in cut.message
        assert (await _tokenize(stub, **_bearer(KEY))).token_ids
        assert other.get_state() is ready, "older than any that was cut"
    assert suite.services["closed"].alive
