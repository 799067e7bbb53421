"""SIGTERM to real processes: what callers and operators see, and the exit code."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from millstream.v1 import (
    decode_pb2_grpc,
    generation_pb2,
    prefill_pb2_grpc,
    processor_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)
from millstream_client import NO_RETRY, Client, UnavailableError
from millstream_client.streams import AnswerStream
from millstream_server.generation.ticket import TicketKey
from millstream_server.runtime.lifecycle.main import CUT_OFF, DRAINED
from millstream_testing.waiting import until
from tests.support.processes.ports import free_port
from tests.support.processes.processes import complaints
from tests.support.processes.simulated_suite import ALPHABET, SimulatedSuite
from tests.support.processes.suite import TICKET_KEY, ServiceProcess
from tests.support.processor.chats import options, start
from tests.support.telemetry.scraping import scrape
from tests.support.wire.long_streams import (
    NOT_SERVING,
    SERVING,
    server_status,
    standing_streams,
    watched_health,
)
from tests.support.worker.worker_streams import Stream, decode_stream, prefill_stream

pytestmark = pytest.mark.timeout(120)

PROCESSOR = "millstream.v1.ProcessorService"
DECODE = "millstream.v1.DecodeService"
PREFILL = "millstream.v1.PrefillService"
STEP_S = 0.02
TOKENS = 200
LONG_S = STEP_S * TOKENS
PROPAGATION_S = 1.0
PROMPT_CHARACTER = 40
"""A token id that the worker's own tests send; the simulated engine counts on from it."""


@contextlib.asynccontextmanager
async def suite(
    folder: Path, processor: dict[str, Any] | None = None, **worker: Any
) -> AsyncIterator[tuple[ServiceProcess, ServiceProcess]]:
    """A slow aggregated worker and a Processor on it."""
    made = SimulatedSuite(folder, {"simulated_step_s": STEP_S})
    one = made.add_worker("worker", **worker)
    front = made.add_processor("processor", **(processor or {}))
    with _started(made):
        await made.until_connected()
        yield front, one


@contextlib.contextmanager
def _started(made: SimulatedSuite) -> Iterator[None]:
    """What a test has not ended itself is killed: nobody waits for a drain."""
    try:
        for service in made.services.values():
            service.start()
        for service in made.services.values():
            service.wait_serving()
        yield
    finally:
        for service in made.services.values():
            service.kill()


def observed_flags() -> tuple[int, int, dict[str, Any]]:
    """A metrics port, an admin port, and the flags for them."""
    metrics, admin = free_port(), free_port()
    flags: dict[str, Any] = {
        "health_listen": f"127.0.0.1:{free_port()}",
        "metrics_listen": f"127.0.0.1:{metrics}",
        "admin_listen": f"127.0.0.1:{admin}",
        "propagation_s": PROPAGATION_S,
    }
    return metrics, admin, flags


async def expect_draining(
    channel: grpc.aio.Channel, metrics: int, service: str, work: str, count: int
) -> None:
    """What the operator sees meanwhile, on addresses of their own."""
    status = await server_status(channel)
    health = dict(status.health)
    assert health.pop("liveness") is True
    assert set(health.values()) == {False}
    assert service in health
    assert status.open_work[work] == count
    scraped = await scrape(metrics)
    assert scraped.value("millstream_draining") == 1
    assert scraped.value("millstream_serving", service=service) == 0


def single(address: str) -> Client:
    """Make a client that hides nothing."""
    return Client(address, retry=NO_RETRY)


async def long_chat(client: Client, tokens: int = TOKENS) -> AnswerStream:
    """Start a chat; it runs when this returns."""
    stream = client.chat("hi", max_new_tokens=tokens, ignore_eos=True)
    await anext(stream)
    return stream


async def failed_end(stream: AnswerStream) -> UnavailableError:
    """Read a chat that must fail, to its one end."""
    with pytest.raises(UnavailableError) as caught:
        async for _ in stream:
            pass
    return caught.value


async def exit_code(service: ServiceProcess, within_s: float) -> int:
    return await service.until_gone(within_s)


# ---- in order ------------------------------------------------------------------------------------


async def test_a_processor_sees_its_chats_out(tmp_path: Path) -> None:
    metrics, admin, flags = observed_flags()
    async with (
        suite(tmp_path, flags) as (front, _),
        single(front.address) as client,
        grpc.aio.insecure_channel(f"127.0.0.1:{admin}") as admin_channel,
        standing_streams(client.channel, load=False),
        watched_health(client.channel, "", PROCESSOR, "liveness") as (whole, own, liveness),
    ):
        assert (await scrape(metrics)).value("millstream_draining") == 0
        running = await long_chat(client)
        front.terminate()
        terminated = time.monotonic()
        await own.until(NOT_SERVING, PROPAGATION_S / 2)
        await whole.until(NOT_SERVING, PROPAGATION_S / 2)
        assert (await client.chat("hi", max_new_tokens=3).answer()).text == "ABC"
        assert time.monotonic() - terminated < PROPAGATION_S, "too slow to tell"
        await expect_draining(admin_channel, metrics, PROCESSOR, "streams", 1)

        gone = await _until_refused(client)
        assert time.monotonic() - terminated > PROPAGATION_S * 0.9
        assert gone.code is grpc.StatusCode.UNAVAILABLE
        assert "Connection refused" in gone.message, "GOAWAY came, and the port takes no more"
        await expect_draining(admin_channel, metrics, PROCESSOR, "streams", 1)
        async with grpc.aio.insecure_channel(str(front.flags["health_listen"])) as probes:
            assert await _health(probes) == NOT_SERVING

        answer = await running.answer()
        assert answer.text.startswith(ALPHABET)
        assert answer.usage.completion_tokens == TOKENS
        assert answer.finish_reason == generation_pb2.FINISH_REASON_LENGTH
        assert await exit_code(front, 3) == DRAINED
        assert whole.told == own.told == [SERVING, NOT_SERVING]
        assert liveness.told == [SERVING]
        await until(lambda: own.ended is not None)
        assert own.ended is grpc.StatusCode.UNAVAILABLE
    assert complaints(front.log.read_text()) == []


async def _until_refused(client: Client) -> UnavailableError:
    """Ask on, with short chats that are answered, until one isn't."""
    while True:
        try:
            assert (await client.chat("hi", max_new_tokens=1).answer()).text == "A"
        except UnavailableError as error:
            return error


async def _health(channel: grpc.aio.Channel) -> int:
    answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
    return int(answer.status)


async def test_a_draining_processor_loses_no_request_of_a_client_that_never_retries(
    tmp_path: Path,
) -> None:
    """A plain client with round_robin, and a long chat on the connection that drains."""
    made = SimulatedSuite(tmp_path, {"simulated_step_s": STEP_S})
    made.add_worker("worker")
    front = made.add_processor("one", propagation_s=0.3)
    other = made.add_processor("other")
    config = '{"loadBalancingConfig": [{"round_robin": {}}]}'
    with _started(made):
        await made.until_connected()
        async with grpc.aio.insecure_channel(
            f"ipv4:{front.address},{other.address}",
            options=[("grpc.service_config", config), ("grpc.enable_retries", 0)],
        ) as channel:
            chat = processor_pb2_grpc.ProcessorServiceStub(channel).Chat
            drained, after, codes = asyncio.Event(), Counter[str](), Counter[str]()

            async def chats() -> None:
                while after.total() < AFTER_DRAIN:
                    codes[await _chatted(chat, 1)] += 1
                    after["chats"] += drained.is_set()

            long = [asyncio.ensure_future(_chatted(chat, TOKENS // 2)) for _ in range(4)]
            load = [asyncio.ensure_future(chats()) for _ in range(8)]
            await until(lambda: codes.total() > AFTER_DRAIN)
            front.terminate()
            assert await exit_code(front, 5) == DRAINED
            drained.set()
            await asyncio.gather(*load)
            assert await asyncio.gather(*long) == ["OK"] * 4
    assert set(codes) == {"OK"}, codes


AFTER_DRAIN = 200


async def _chatted(chat: Any, tokens: int) -> str:
    """Chat once; return the code, and the text if it isn't whole."""
    call = chat(iter([start("hi", opts=options(tokens, ignore_eos=True))]))
    count = 0
    with contextlib.suppress(grpc.aio.AioRpcError):
        async for response in call:
            count += sum(choice.token_count for choice in response.choices)
    code: grpc.StatusCode = await call.code()
    return code.name if count == tokens else f"{code.name}: {await call.details()}, {count} tokens"


def _worker(folder: Path, service: str, flags: dict[str, Any]) -> ServiceProcess:
    made = SimulatedSuite(folder, {"simulated_step_s": STEP_S})
    if service == PREFILL:
        slow: dict[str, Any] = {"simulated_prefill_s_per_token": LONG_S, "handoff_wait_s": 2}
        return made.add_worker("worker", "prefill", bootstrap_port=free_port(), **slow, **flags)
    return made.add_worker("worker", **flags)


@contextlib.asynccontextmanager
async def lone_worker(
    folder: Path, service: str = DECODE, **flags: Any
) -> AsyncIterator[tuple[ServiceProcess, grpc.aio.Channel]]:
    worker = _worker(folder, service, dict(flags)).start()
    try:
        await worker.until_serving()
        async with grpc.aio.insecure_channel(worker.address) as channel:
            yield worker, channel
    finally:
        worker.kill()


async def test_a_worker_sees_its_requests_out(tmp_path: Path) -> None:
    metrics, admin, flags = observed_flags()
    async with (
        lone_worker(tmp_path, **flags) as (worker, channel),
        grpc.aio.insecure_channel(f"127.0.0.1:{admin}") as admin_channel,
        standing_streams(channel, load=True),
        watched_health(channel, DECODE, "liveness") as (own, liveness),
    ):
        stub = decode_pb2_grpc.DecodeServiceStub(channel)
        told = decode_stream(stub)
        await told.start(0, [PROMPT_CHARACTER], max_new_tokens=TOKENS)
        await told.first_token(0)
        worker.terminate()
        terminated = time.monotonic()
        await own.until(NOT_SERVING, PROPAGATION_S / 2)
        await told.until(lambda: any(frame.draining for frame in told.frames))
        late = decode_stream(stub)
        assert await _is_taken(late)
        assert time.monotonic() - terminated < PROPAGATION_S, "too slow to tell"
        await expect_draining(admin_channel, metrics, DECODE, "requests", 1)

        while await _is_taken(late):
            assert time.monotonic() - terminated < PROPAGATION_S * 2
        assert time.monotonic() - terminated > PROPAGATION_S * 0.9
        assert await _is_taken(told), "it may have crossed the news"
        await expect_draining(admin_channel, metrics, DECODE, "requests", 1)
        (whole,) = await told.ended(0)
        assert whole.finish is not None
        assert whole.finish.reason == generation_pb2.FINISH_REASON_LENGTH
        assert len(whole.token_ids) == TOKENS
        await told.drain()
        await late.drain()
        # All of it with WatchLoad and the rest still open.
        assert await exit_code(worker, 1.5) == DRAINED
        assert own.told == [SERVING, NOT_SERVING]
        assert liveness.told == [SERVING]
    assert complaints(worker.log.read_text()) == []


async def _is_taken(stream: Stream) -> bool:
    """Run a short request; tell whether it was answered. A refusal says to try elsewhere."""
    await stream.start(1, [PROMPT_CHARACTER], max_new_tokens=1)
    (view,) = await stream.ended(1)
    if view.error is None:
        assert view.token_ids == [PROMPT_CHARACTER + 1]
        return True
    assert view.reason == "WORKER_DRAINING"
    assert view.error.code == grpc.StatusCode.UNAVAILABLE.value[0]
    assert view.error.retry_delay.ToMilliseconds() == 100
    assert not view.token_ids
    return False


async def test_a_peer_that_never_closes_its_stream_holds_a_worker_for_its_drain(
    tmp_path: Path,
) -> None:
    async with lone_worker(tmp_path, propagation_s=0, drain_s=2) as (worker, channel):
        stream = decode_stream(decode_pb2_grpc.DecodeServiceStub(channel))
        assert await _is_taken(stream)
        worker.terminate()
        assert await exit_code(worker, 2 + 2) == DRAINED
    assert complaints(worker.log.read_text()) == []


async def test_a_prefill_worker_sees_its_prompts_out(tmp_path: Path) -> None:
    async with lone_worker(tmp_path, PREFILL, propagation_s=0) as (worker, channel):
        ticket = TicketKey.from_hex(TICKET_KEY).mint(
            "127.0.0.1", int(str(worker.flags["bootstrap_port"]))
        )
        stream = prefill_stream(prefill_pb2_grpc.PrefillServiceStub(channel))
        await stream.start(0, [PROMPT_CHARACTER], max_new_tokens=1, ticket=ticket)
        await until(lambda: _has_work(channel))
        worker.terminate()
        # Nobody comes for its KV cache, which is the request's own end, and waited for.
        (view,) = await stream.ended(0)
        assert view.reason == "KV_TRANSFER_FAILED"
        await stream.drain()
        assert await exit_code(worker, 3) == DRAINED
    assert complaints(worker.log.read_text()) == []


async def _has_work(channel: grpc.aio.Channel) -> bool:
    stub: Any = worker_pb2_grpc.WorkerServiceStub(channel)
    watch = stub.WatchLoad(worker_pb2.WatchLoadRequest())
    load = (await watch.read()).load
    watch.cancel()
    return bool(load.running_requests)


@pytest.mark.parametrize("kind", ["worker", "processor"])
async def test_an_idle_process_is_gone_at_once_whoever_watches(tmp_path: Path, kind: str) -> None:
    async with suite(tmp_path, {"propagation_s": 0}, propagation_s=0) as (front, worker):
        service = front if kind == "processor" else worker
        async with (
            grpc.aio.insecure_channel(service.address) as channel,
            standing_streams(channel, load=kind == "worker"),
            watched_health(channel, "", "never-heard-of"),
        ):
            service.terminate()
            assert await exit_code(service, 2) == DRAINED
        assert complaints(service.log.read_text()) == []


# ---- out of time ---------------------------------------------------------------------------------


async def test_a_processor_out_of_patience_cuts_its_chats(tmp_path: Path) -> None:
    flags: dict[str, Any] = {"propagation_s": 0, "drain_s": 0.5}
    async with suite(tmp_path, flags) as (front, _), single(front.address) as client:
        running = await long_chat(client)
        front.terminate()
        terminated = time.monotonic()
        error = await failed_end(running)
        assert 0.4 < time.monotonic() - terminated < 0.5 + 1.5
        assert error.code is grpc.StatusCode.UNAVAILABLE
        assert error.reason == "UNAVAILABLE"
        assert error.retryable
        assert error.partial is not None
        assert error.partial.text.startswith("ABC")
        assert not error.partial.complete
        assert await exit_code(front, 3) == CUT_OFF
    assert complaints(front.log.read_text()) == []


async def test_a_worker_out_of_patience_cuts_its_requests(tmp_path: Path) -> None:
    async with (
        suite(tmp_path, propagation_s=0, drain_s=0.5) as (front, worker),
        single(front.address) as client,
    ):
        running = await long_chat(client)
        worker.terminate()
        error = await failed_end(running)
        assert error.code is grpc.StatusCode.UNAVAILABLE
        assert error.reason == "WORKER_LOST"
        assert error.retryable
        assert error.partial is not None
        assert error.partial.text.startswith("ABC")
        assert await exit_code(worker, 3) == CUT_OFF
        assert complaints(worker.log.read_text()) == []
        assert complaints(front.log.read_text()) == []


@pytest.mark.parametrize("kind", ["worker", "processor"])
async def test_a_second_signal_is_for_those_in_a_hurry(tmp_path: Path, kind: str) -> None:
    async with suite(tmp_path) as (front, worker), single(front.address) as client:
        service = front if kind == "processor" else worker
        running = await long_chat(client)
        service.terminate()
        async with watched_health(client.channel, PROCESSOR) as (health,):
            await health.until(NOT_SERVING)  # the first was heard, and the worker's by the front
        service.terminate()
        hurried = time.monotonic()
        assert await exit_code(service, 5) == CUT_OFF
        assert time.monotonic() - hurried < 2
        assert (await failed_end(running)).retryable
        assert complaints(service.log.read_text()) == []
