"""Workers that die, come back or leave in good order, each a real process."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from millstream.v1 import (
    generation_pb2,
    processor_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)
from millstream_client import Client
from millstream_testing.waiting import until
from tests.conftest import ALPHABET_TEMPLATE
from tests.support.models.models import byte_level_model
from tests.support.processes.ports import free_port
from tests.support.processes.suite import ServiceProcess, running
from tests.support.processor.chats import (
    Answer,
    Conversation,
    chat,
    options,
    start,
    until_connected,
)
from tests.support.wire.failures import Failure, failure

CHATS = 40
TOKENS = 250
_STEPS = 40
LENGTH = generation_pb2.FINISH_REASON_LENGTH


@dataclass
class Suite:
    """Two aggregated workers and a Processor."""

    one: ServiceProcess
    two: ServiceProcess
    processor: ServiceProcess


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_level_model(
        tmp_path_factory.mktemp("model"), tokenizer_config={"chat_template": ALPHABET_TEMPLATE}
    )


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Suite]:
    log = tmp_path_factory.mktemp("logs") / "suite.log"
    one, two = _worker(log), _worker(log)
    processor = _processor(log, model, one, two)
    with running(one, two, processor):
        yield Suite(one, two, processor)


@pytest.fixture
async def suite(processes: Suite) -> Suite:
    """All of it running, whatever the test before has done to it."""
    for service in (processes.one, processes.two, processes.processor):
        if service.process is None or service.process.poll() is not None:
            service.start()
        await service.until_serving()
    async with _client(processes.processor) as stub:
        await until_connected(stub, 2)
    return processes


def _worker(log: Path, module: str = "decode", **flags: object) -> ServiceProcess:
    simulated = {
        "engine": "simulated",
        "model_name": "tiny",
        "context_length": 512,
        "simulated_vocab_size": 440,
        "simulated_step_s": 0.01,
        "log_level": "warning",
    }
    return ServiceProcess(f"millstream_server.{module}", {**simulated, **flags}, log)


def _processor(log: Path, model: Path, *workers: ServiceProcess) -> ServiceProcess:
    addresses = ",".join(worker.address for worker in workers)
    flags = {"models": f"tiny={model}", "workers": addresses, "log_level": "warning"}
    return ServiceProcess("millstream_server.processor", flags, log)


@contextlib.asynccontextmanager
async def _client(processor: ServiceProcess) -> AsyncIterator[Any]:
    async with grpc.aio.insecure_channel(processor.address) as channel:
        yield processor_pb2_grpc.ProcessorServiceStub(channel)


async def _running(worker: ServiceProcess) -> int:
    async with grpc.aio.insecure_channel(worker.address) as channel:
        stub: Any = worker_pb2_grpc.WorkerServiceStub(channel)
        watch = stub.WatchLoad(worker_pb2.WatchLoadRequest())
        load = (await watch.read()).load
        watch.cancel()
        return int(load.running_requests)


async def _outcome(conversation: Conversation) -> tuple[Answer | Failure, float]:
    """Read a chat to its end; say how it ended and when."""
    try:
        (answer,) = await conversation.end()
    except grpc.aio.AioRpcError as error:
        return failure(error), time.monotonic()
    else:
        return answer, time.monotonic()


async def _start_chats(stub: Any, count: int) -> list[Conversation]:
    conversations = [Conversation(stub) for _ in range(count)]
    for conversation in conversations:
        await conversation.say(start("hi", opts=options(TOKENS)))
    for conversation in conversations:
        await conversation.read()
    return conversations


async def test_requests_of_a_killed_worker_go_on_and_it_is_taken_back(suite: Suite) -> None:
    async with _client(suite.processor) as stub:
        conversations = await _start_chats(stub, CHATS)
        assert await _running(suite.one) == await _running(suite.two) == CHATS // 2
        ends = [asyncio.ensure_future(_outcome(c)) for c in conversations]
        suite.one.kill()
        await until_connected(stub, 1)
        assert (await chat(stub, "hi", opts=options(3))).text == "ABC"

        went_on, texts = 0, set()
        for answer, _ in await asyncio.gather(*ends):
            assert isinstance(answer, Answer), answer
            assert answer.finish_reason == LENGTH
            assert answer.usage.completion_tokens == TOKENS
            assert answer.finished
            went_on += len(answer.finished.redispatches)
            texts.add(answer.text)
        assert (went_on, len(texts)) == (CHATS // 2, 1)

        suite.one.start()
        await until_connected(stub, 2)
        again = await _start_chats(stub, 10)
        # More than half where the other worker's last report still counts requests that have ended.
        assert await _running(suite.one) >= 5
        for conversation in again:
            conversation.call.cancel()


async def test_a_killed_prefill_worker_ends_requests_whose_transfer_it_owed(
    tmp_path: Path, model: Path
) -> None:
    log = tmp_path / "log"
    prefill = _worker(
        log, "prefill", bootstrap_port=free_port(), simulated_prefill_s_per_token=60.0
    )
    decode = _worker(log, mode="disaggregated")
    processor = _processor(log, model, prefill, decode)
    with running(prefill, decode, processor):
        async with _client(processor) as stub:
            await until_connected(stub, 2)
            conversations = [Conversation(stub) for _ in range(10)]
            for conversation in conversations:
                await conversation.say(start("hi", opts=options(TOKENS)))
            for worker in (prefill, decode):
                await _until_running(worker, 10)
            ends = [asyncio.ensure_future(_outcome(c)) for c in conversations]
            prefill.kill()
            killed = time.monotonic()
            for failed, at in await asyncio.gather(*ends):
                assert isinstance(failed, Failure)
                assert failed.code is grpc.StatusCode.UNAVAILABLE
                assert failed.reason in ("WORKER_LOST", "KV_TRANSFER_FAILED")  # who sees it first
                assert failed.retryable
                assert at - killed < 2
            await _until_running(decode, 0)

            prefill.flags = {**prefill.flags, "simulated_prefill_s_per_token": 0}
            prefill.start()
            await until_connected(stub, 2)
            assert (await chat(stub, "hi", opts=options(3))).text == "ABC"


async def _until_running(worker: ServiceProcess, count: int) -> None:
    async def reached() -> bool:
        return await _running(worker) == count

    await until(reached)


async def _refused_by(stub: Any, reason: str) -> bool:
    """Try one request; if it fails, then for this reason."""
    conversation = Conversation(stub)
    await conversation.say(start("hi", opts=options(1)))
    outcome, _ = await _outcome(conversation)
    if isinstance(outcome, Answer):
        return False
    assert outcome.code is grpc.StatusCode.UNAVAILABLE
    assert outcome.reason == reason
    assert outcome.retryable is bool(reason)
    return True


async def test_sigterm_of_a_worker_costs_no_request(suite: Suite) -> None:
    async with _client(suite.processor) as stub:
        conversations = await _start_chats(stub, 10)
        assert suite.one.process is not None
        suite.one.terminate()
        while suite.one.process.poll() is None:
            assert (await chat(stub, "hi", opts=options(1))).text == "A"
        assert suite.one.process.poll() == 0
        await _all_complete(conversations)
        assert (await chat(stub, "hi", opts=options(1))).text == "A"


async def test_sigterm_of_the_processor_finishes_what_runs(suite: Suite) -> None:
    async with _client(suite.processor) as stub:
        conversations = await _start_chats(stub, 10)
        between_turns = Conversation(stub)
        await between_turns.say(start("hi", opts=options(1)))
        await between_turns.answer()
        assert suite.processor.process is not None
        suite.processor.terminate()

        async def gone() -> bool:
            return await _refused_by(stub, "")  # GOAWAY, and the port takes no more

        await until(gone)
        await _all_complete(conversations)
        assert await between_turns.read()
        assert between_turns.draining
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await between_turns.read()
        assert failure(ended.value).reason == "UNAVAILABLE"
        assert failure(ended.value).retryable
        assert await asyncio.to_thread(suite.processor.process.wait, 5) == 0


async def _all_complete(conversations: list[Conversation]) -> None:
    for conversation in conversations:
        outcome, _ = await _outcome(conversation)
        assert isinstance(outcome, Answer)
        assert outcome.usage.completion_tokens == TOKENS


async def test_a_retry_of_the_library_takes_an_image_to_another_worker(tmp_path: Path) -> None:
    flags = {"engine": "simulated", "model_name": "drawing", "simulated_step_s": 0.02}
    workers = [
        ServiceProcess("millstream_server.diffusion", flags, tmp_path / f"worker-{i}.log")
        for i in range(2)
    ]
    front = ServiceProcess(
        "millstream_server.processor",
        {"models": "drawing", "workers": ",".join(worker.address for worker in workers)},
        tmp_path / "front.log",
    )
    with running(*workers, front):
        async with Client(front.address) as client:
            await until(client.health, 20)
            expected = await client.generate_image("a cat", seed=3, steps=_STEPS).result()
            stream = client.generate_image("a cat", seed=3, steps=_STEPS)
            async for progress in stream:
                if progress.step >= 2:
                    break
            (loser,) = [worker for worker in workers if await _running(worker)]
            loser.kill()
            again = [progress.step async for progress in stream]
            assert 0 in again, "from the first step on"
            assert stream.media.files == expected.files
