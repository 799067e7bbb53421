"""An engine that hangs: its worker reports it, Processors avoid the worker, and later it stops.

The workers are whole ones, as `worker.app` wires them, but in this process, where a test can reach
into the engine. The canary's times are short.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import grpc
import pytest

from millstream_client import NO_RETRY, Client, UnavailableError
from millstream_server.control.engine import Role
from millstream_server.decode.app import DecodeSettings
from millstream_server.engines.registry import GENERATORS
from millstream_server.engines.simulated.engine import SimulatedConfig, SimulatedEngine
from millstream_server.generation.worker import app
from millstream_server.generation.worker.servicer import DECODE as SERVED
from millstream_server.processor.text.tokenizer import TextModel
from millstream_server.runtime.lifecycle.main import FAILED
from millstream_server.runtime.telemetry.metrics import DRAINING
from millstream_testing.in_process import (
    CONTEXT_LENGTH,
    MODEL,
    VOCAB_SIZE,
    InProcessProcessor,
    processor,
)
from millstream_testing.waiting import until
from tests.support.processes.ports import free_port
from tests.support.telemetry.logged import events
from tests.support.telemetry.scraping import scrape
from tests.support.wire.long_streams import NOT_SERVING, SERVING, HealthWatch, watched_health

pytestmark = pytest.mark.timeout(60)

DECODE = "millstream.v1.DecodeService"
INTERVAL_S, TIMEOUT_S = 0.1, 0.3
NOTICED_WITHIN_S = INTERVAL_S + TIMEOUT_S + 1.5  # of a machine that others share
QUICK_S = 1.0
LONG = 300


@dataclass
class Worker:
    """One that runs here, and its engine."""

    engine: SimulatedEngine
    settings: DecodeSettings
    code: asyncio.Task[int]
    health: HealthWatch
    liveness: HealthWatch

    @property
    def address(self) -> str:
        return self.settings.listen

    @property
    def metrics_port(self) -> int:
        return int(self.settings.metrics_listen.rpartition(":")[2])

    async def running(self) -> int:
        return (await self.engine.load()).running_requests

    async def wedge(self) -> float:
        """Hang the engine and wait until the worker tells; answers how long that took."""
        began = time.monotonic()
        self.engine.wedge()
        await self.health.until(NOT_SERVING, NOTICED_WITHIN_S)
        return time.monotonic() - began


@contextlib.asynccontextmanager
async def worker(
    monkeypatch: pytest.MonkeyPatch, *, stuck_limit_s: float = 0.0
) -> AsyncIterator[Worker]:
    """Run a worker's whole app, aggregated, until the test ends."""
    engine = SimulatedEngine(
        SimulatedConfig(vocab_size=VOCAB_SIZE, context_length=CONTEXT_LENGTH, step_s=0.005)
    )
    monkeypatch.setattr(GENERATORS, "make", lambda *_, **__: engine)
    settings = DecodeSettings(
        listen=f"127.0.0.1:{free_port()}",
        metrics_listen=f"127.0.0.1:{free_port()}",
        engine="simulated",
        model_name=MODEL,
        canary_interval_s=INTERVAL_S,
        canary_timeout_s=TIMEOUT_S,
        stuck_limit_s=stuck_limit_s,
    )
    code = asyncio.ensure_future(app.run(settings, Role.AGGREGATED, SERVED))
    try:
        async with (
            grpc.aio.insecure_channel(settings.listen) as channel,
            watched_health(channel, DECODE, "liveness") as (health, liveness),
        ):
            await health.until(SERVING)
            health.told[:] = [SERVING]  # before that, that it loads, if the watch came so early
            yield Worker(engine, settings, code, health, liveness)
    finally:
        code.cancel()
        await asyncio.wait({code})
        DRAINING.set(0)  # the gauge is this whole process's


@contextlib.asynccontextmanager
async def suite(
    monkeypatch: pytest.MonkeyPatch,
    text_model: TextModel,
    count: int,
    *,
    stuck_limit_s: float = 0.0,
) -> AsyncIterator[tuple[InProcessProcessor, Client, Sequence[Worker]]]:
    async with contextlib.AsyncExitStack() as stack:
        workers = [
            await stack.enter_async_context(worker(monkeypatch, stuck_limit_s=stuck_limit_s))
            for _ in range(count)
        ]
        addresses = [one.address for one in workers]
        front = await stack.enter_async_context(processor({MODEL: text_model}, addresses))
        client = await stack.enter_async_context(Client(front.address, retry=NO_RETRY))
        yield front, client, workers


async def _connected(front: InProcessProcessor, count: int) -> None:
    await until(lambda: sum(front.router.connected(MODEL).values()) == count, NOTICED_WITHIN_S)


async def _chat(client: Client) -> str:
    return (await client.chat("hi", max_new_tokens=3, timeout_s=10).answer()).text


async def test_new_chats_go_round_a_stuck_worker_until_it_has_recovered(
    monkeypatch: pytest.MonkeyPatch, text_model: TextModel
) -> None:
    async with suite(monkeypatch, text_model, 2) as (front, client, (stuck, normal)):
        chats = [client.chat("hi", max_new_tokens=LONG, ignore_eos=True) for _ in range(4)]
        for chat in chats:
            await anext(chat)
        assert await stuck.running() == await normal.running() == 2
        await stuck.wedge()
        await _connected(front, 1)
        began = time.monotonic()
        for _ in range(20):
            assert await _chat(client) == "ABC"
        assert time.monotonic() - began < 20 * QUICK_S
        assert await stuck.running() <= 2 + 1, "its own two, and a canary"
        assert normal.health.told == [SERVING]

        stuck.engine.unwedge()
        await stuck.health.until(SERVING, NOTICED_WITHIN_S)
        await _connected(front, 2)
        # What hung with it goes on, and nothing of it was lost.
        for chat in chats:
            assert (await chat.answer()).usage.completion_tokens == LONG
        assert stuck.health.told == [SERVING, NOT_SERVING, SERVING]
        assert stuck.liveness.told == [SERVING]
        # Reports of how loaded it is may be a second old.
        await until(lambda: _gets_chats(client, stuck))


async def _gets_chats(client: Client, one: Worker) -> bool:
    """Start two chats; tell whether it got one of them."""
    async with (
        client.chat("hi", max_new_tokens=LONG, ignore_eos=True) as first,
        client.chat("hi", max_new_tokens=LONG, ignore_eos=True) as second,
    ):
        await anext(first)
        await anext(second)
        return await one.running() == 1


async def test_a_lone_stuck_worker_is_a_quick_refusal(
    monkeypatch: pytest.MonkeyPatch, text_model: TextModel
) -> None:
    async with suite(monkeypatch, text_model, 1) as (front, client, (stuck,)):
        assert await client.health()
        await stuck.wedge()
        await _connected(front, 0)
        began = time.monotonic()
        with pytest.raises(UnavailableError) as refused:
            await _chat(client)
        assert time.monotonic() - began < QUICK_S
        assert refused.value.reason == "NO_WORKER"
        assert refused.value.retryable
        assert refused.value.retry_delay_s == 1.0
        assert not await client.health()
        (model,) = await client.models()
        assert not model.ready

        stuck.engine.unwedge()
        await _connected(front, 1)
        assert await _chat(client) == "ABC"
        assert await client.health()


async def test_the_metrics_of_a_worker_tell_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async with worker(monkeypatch) as one:
        await until(lambda: _canary_ran(one))
        before = await scrape(one.metrics_port)
        assert before.value("millstream_serving", service=DECODE) == 1
        failures = before.value("millstream_canary_failures_total", dp_rank="0")
        await one.wedge()
        stuck = await scrape(one.metrics_port)
        assert stuck.value("millstream_serving", service=DECODE) == 0
        assert stuck.value("millstream_canary_failures_total", dp_rank="0") == failures + 1
        assert stuck.value("millstream_draining") == 0
        # The scrape itself doesn't hang with the engine.
        assert stuck.value("millstream_engine_running_requests") >= 0
        one.engine.unwedge()
        await one.health.until(SERVING)
        assert (await scrape(one.metrics_port)).value("millstream_serving", service=DECODE) == 1


async def _canary_ran(one: Worker) -> bool:
    text = (await scrape(one.metrics_port)).text
    return 'millstream_canary_duration_seconds_count{dp_rank="0"}' in text


async def test_an_engine_that_stays_stuck_is_given_up(
    monkeypatch: pytest.MonkeyPatch, text_model: TextModel, caplog: pytest.LogCaptureFixture
) -> None:
    limit_s = 0.5
    async with suite(monkeypatch, text_model, 1, stuck_limit_s=limit_s) as (front, client, (one,)):
        chat = client.chat("hi", max_new_tokens=LONG, ignore_eos=True)
        await anext(chat)
        await one.wedge()
        noticed = time.monotonic()
        with pytest.raises(UnavailableError) as lost:
            async for _ in chat:
                pass
        assert lost.value.reason in ("WORKER_LOST", "ENGINE_FAILED")
        assert lost.value.retryable
        assert await asyncio.wait_for(one.code, 5) == FAILED
        assert limit_s * 0.9 < time.monotonic() - noticed < limit_s + 3
        assert one.liveness.told == [SERVING]
        (stops,) = events(caplog, "worker stops after a failure")
        assert stops == {"reason": "it was stuck for 0.5 s"}
        await _connected(front, 0)


async def test_an_engine_that_recovers_in_time_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    limit_s = 1.0
    async with worker(monkeypatch, stuck_limit_s=limit_s) as one:
        await one.wedge()
        noticed = asyncio.get_running_loop().time()
        one.engine.unwedge()
        await one.health.until(SERVING)
        # Longer than the limit after it was stuck: patience that ran on would have run out.
        await until(lambda: asyncio.get_running_loop().time() > noticed + limit_s + 0.5)
        assert not one.code.done()
        assert one.health.told == [SERVING, NOT_SERVING, SERVING]
