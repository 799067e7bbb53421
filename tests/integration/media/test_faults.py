"""Workers and Processors that die or leave while images are encoded and fetched; real processes."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from millstream.v1 import generation_pb2
from millstream_testing.waiting import until
from tests.support.media.media_files import solid
from tests.support.media.media_processes import (
    MediaProcesses,
    decoders_of,
    metric,
    open_requests,
    text_chat,
)
from tests.support.media.media_suite import image, user
from tests.support.models.vision_models import make_vision_model
from tests.support.processes.processes import clients_of
from tests.support.processes.suite import ServiceProcess
from tests.support.processor.chats import (
    CANCEL,
    Answer,
    Conversation,
    options,
    start,
    until_connected,
)
from tests.support.wire.failures import Failure, failure

FEW = options(4, ignore_eos=True)
BESIDE_TOKENS = 200
LENGTH = generation_pb2.FINISH_REASON_LENGTH
SOON_S = 10.0
"""Until a client knows that a worker was killed."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vision_model(tmp_path_factory.mktemp("model") / "qwen", "qwen2_5_vl")


@pytest.fixture
def suite(tmp_path: Path, model: Path) -> MediaProcesses:
    return MediaProcesses(tmp_path, model)


def picture(number: int) -> bytes:
    return solid(size=(56, 56), color=f"rgb({number},{number},{number})")


async def ask(stub: Any, data: bytes) -> tuple[Answer | Failure, float]:
    """Ask about a picture; return the answer or the failure, and when it came."""
    chat = Conversation(stub)
    await chat.say(start(messages=[user("What is this? ", image(data))], opts=FEW))
    return await outcome(chat)


async def outcome(chat: Conversation) -> tuple[Answer | Failure, float]:
    try:
        (answer,) = await chat.end()
    except grpc.aio.AioRpcError as error:
        return failure(error), time.monotonic()
    return answer, time.monotonic()


def is_answer(found: Answer | Failure) -> bool:
    return isinstance(found, Answer) and found.usage.media_tokens == 4


async def expect_undisturbed(beside: Conversation) -> None:
    """Read a chat without media to its end."""
    answer, _ = await outcome(beside)
    assert isinstance(answer, Answer)
    assert answer.usage.completion_tokens == BESIDE_TOKENS
    assert answer.finish_reason == LENGTH


async def expect_free(encode: ServiceProcess) -> None:
    """Wait until an encode worker holds nothing but its cache."""

    async def free() -> bool:
        held = [
            await metric(encode, f"millstream_encode_{name}") for name in ("leases", "upload_bytes")
        ]
        return [*held, await open_requests(encode)] == [0, 0, 0]

    await until(free)


# ---- the encode worker, mid-item ----------------------------------------------------------------


async def _mid_item(encode: ServiceProcess) -> bool:
    """Whether a file was decoded and its item is in the tower."""
    return bool(decoders_of(encode.pid)) and await open_requests(encode) == 1


async def test_an_item_of_a_killed_encode_worker_goes_to_another(suite: MediaProcesses) -> None:
    workers = [suite.add_encode(f"encode-{i}", simulated_item_s=1.0) for i in (1, 2)]
    suite.add_pair()
    suite.add_processor()
    names = suite.shared_names()
    with suite.running():
        async with suite.client() as stub:
            beside = await text_chat(stub, BESIDE_TOKENS)
            asked = asyncio.ensure_future(ask(stub, picture(1)))
            holder = await _holder(workers)
            (other,) = (worker for worker in workers if worker is not holder)
            assert not decoders_of(other.pid)
            holder.kill()
            answer, _ = await asked
            assert is_answer(answer)
            assert decoders_of(other.pid)
            await suite.expect_nothing_left(holder.pid, names)
            await expect_undisturbed(beside)


async def _holder(workers: list[ServiceProcess]) -> ServiceProcess:
    found: list[ServiceProcess] = []

    async def one_has_it() -> bool:
        found.extend([worker for worker in workers if await _mid_item(worker)])
        return bool(found)

    await until(one_has_it)
    return found[0]


async def test_an_item_of_the_only_encode_worker_fails_once(suite: MediaProcesses) -> None:
    encode = suite.add_encode(simulated_item_s=30.0)
    suite.add_pair()
    suite.add_processor()
    names = suite.shared_names()
    with suite.running():
        async with suite.client() as stub:
            beside = await text_chat(stub, BESIDE_TOKENS)
            asked = asyncio.ensure_future(ask(stub, picture(1)))
            await until(lambda: _mid_item(encode))
            encode.kill()
            killed = time.monotonic()
            failed, at = await asked
            assert isinstance(failed, Failure)
            assert failed.code is grpc.StatusCode.UNAVAILABLE
            assert failed.reason == "NO_WORKER"
            assert failed.retryable
            assert "encode" in failed.message
            assert at - killed < SOON_S
            await suite.expect_nothing_left(encode.pid, names)
            await expect_undisturbed(beside)

            encode.flags = {**encode.flags, "simulated_item_s": 0}
            encode.start()
            await until_connected(stub, 3)
            assert is_answer((await ask(stub, picture(1)))[0])


# ---- while prefill fetches -----------------------------------------------------------------------


@dataclass
class Fetching:
    """A chat whose prefill worker has begun to fetch from an encode worker that is stopped."""

    chat: asyncio.Future[tuple[Answer | Failure, float]]
    stub: Any
    encode: ServiceProcess
    prefill: ServiceProcess


@pytest.fixture
async def fetching(suite: MediaProcesses) -> AsyncIterator[Fetching]:
    encode = suite.add_encode()
    prefill = suite.add_prefill()
    suite.add_decode(mode="disaggregated")
    suite.add_processor()
    suite.add_processor("narrow", max_admitted_requests=1)
    with suite.running():
        async with suite.client() as wide, suite.client("narrow") as stub:
            before = await text_chat(stub, 100_000 // 16)
            chat = Conversation(stub)
            await chat.say(start(messages=[user("What? ", image(picture(1)))], opts=FEW))
            asked = asyncio.ensure_future(outcome(chat))

            async def leased() -> bool:
                return await metric(encode, "millstream_encode_leases") == 1

            await until(leased, 30)  # and its chat waits for the one before it
            clients = clients_of(encode.port)
            assert encode.process is not None
            encode.process.send_signal(signal.SIGSTOP)
            try:
                await before.say(CANCEL)
                await before.end()
                await until(lambda: clients_of(encode.port) == clients + 1)  # prefill's
                beside = await text_chat(wide, BESIDE_TOKENS)
                yield Fetching(asked, stub, encode, prefill)
                await expect_undisturbed(beside)
            finally:
                if encode.alive:
                    encode.process.send_signal(signal.SIGCONT)


async def test_a_prefill_worker_that_dies_while_it_fetches(
    suite: MediaProcesses, fetching: Fetching
) -> None:
    names = suite.shared_names()
    fetching.prefill.kill()
    killed = time.monotonic()
    failed, at = await fetching.chat
    assert isinstance(failed, Failure)
    assert failed.code is grpc.StatusCode.UNAVAILABLE
    assert failed.reason in ("WORKER_LOST", "KV_TRANSFER_FAILED")  # who sees it first
    assert failed.retryable
    assert at - killed < SOON_S
    encode = fetching.encode
    assert encode.process is not None
    encode.process.send_signal(signal.SIGCONT)
    await expect_free(encode)
    await until(lambda: suite.shared_names() <= names)


async def test_an_encode_worker_that_dies_while_prefill_fetches(
    suite: MediaProcesses, fetching: Fetching
) -> None:
    names = suite.shared_names()
    fetching.encode.kill()
    killed = time.monotonic()
    failed, at = await fetching.chat
    assert isinstance(failed, Failure)
    assert failed.code is grpc.StatusCode.UNAVAILABLE
    assert failed.reason == "EMBEDDING_TRANSFER_FAILED"
    assert failed.message == "an embedding did not arrive from its encode worker; retry"
    assert failed.retryable
    assert at - killed < SOON_S
    await suite.expect_nothing_left(fetching.encode.pid, names)

    fetching.encode.start()
    await until_connected(fetching.stub, 3)
    assert is_answer((await ask(fetching.stub, picture(1)))[0])


# ---- the Processor -------------------------------------------------------------------------------


async def test_a_processor_that_dies_leaves_no_lease_and_no_item(suite: MediaProcesses) -> None:
    encode = suite.add_encode(simulated_item_s=1.0)
    suite.add_pair()
    suite.add_processor()
    doomed = suite.add_processor("doomed", max_admitted_requests=1)
    names = suite.shared_names()
    with suite.running():
        async with suite.client() as other, suite.client("doomed") as stub:
            beside = await text_chat(other, BESIDE_TOKENS)
            chats = [await text_chat(stub, 1000)]  # the next ones wait, with their leases

            async def leased() -> bool:
                return await metric(encode, "millstream_encode_leases") == 1

            async def running() -> bool:
                return await leased() and await open_requests(encode) == 1

            for data, reached in ((picture(1), leased), (picture(2), running)):
                chats.append(chat := Conversation(stub))
                await chat.say(start(messages=[user(image(data))], opts=FEW))
                await until(reached)
            assert await metric(encode, "millstream_encode_store_bytes") > 0
            doomed.kill()
            for chat in chats:
                failed, _ = await outcome(chat)
                assert isinstance(failed, Failure)
                assert failed.code is grpc.StatusCode.UNAVAILABLE
            await expect_free(encode)
            assert decoders_of(encode.pid), "the worker's own decoder goes on"
            assert suite.shared_names() <= names
            assert is_answer((await ask(other, picture(1)))[0])
            await expect_undisturbed(beside)


# ---- in good order -------------------------------------------------------------------------------


async def test_sigterm_of_an_encode_worker_costs_no_request(suite: MediaProcesses) -> None:
    workers = [suite.add_encode(f"encode-{i}", simulated_item_s=0.3) for i in (1, 2)]
    suite.add_pair()
    suite.add_processor()
    with suite.running():
        async with suite.client() as stub:
            asked = [asyncio.ensure_future(ask(stub, picture(n))) for n in range(8)]

            async def both_busy() -> bool:
                return all([await open_requests(worker) > 1 for worker in workers])

            await until(both_busy)
            leaving, staying = workers
            pid, had = leaving.pid, await _made(leaving)
            leaving.terminate()
            new = 0
            while leaving.alive:
                assert is_answer((await ask(stub, picture(100 + new)))[0])
                new += 1
            assert await leaving.until_gone() == 0
            assert all(is_answer(answer) for answer, _ in await asyncio.gather(*asked))
            assert not decoders_of(pid)
            assert await _made(staying) <= len(asked) - had + new, "some were made twice"


async def _made(encode: ServiceProcess) -> int:
    return int(await metric(encode, "millstream_encode_lookups_total", result="miss"))
