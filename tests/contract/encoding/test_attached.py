"""EncodeService beside DecodeService in one aggregated worker."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc

from millstream.v1 import (
    decode_pb2,
    decode_pb2_grpc,
    encode_pb2,
    encode_pb2_grpc,
    generation_pb2,
    worker_pb2,
    worker_pb2_grpc,
)
from millstream_server.control.engine import Role
from millstream_server.encode.transfer.store import Leases
from millstream_server.encode.worker.pipeline import HostedEncoder
from millstream_server.encode.worker.servicer import with_encoding
from millstream_server.engines.simulated.encoder import SimulatedEncoder
from millstream_server.engines.simulated.engine import SimulatedConfig, SimulatedEngine
from millstream_server.generation.worker.app import make_plan
from millstream_server.generation.worker.servicer import DECODE
from millstream_server.runtime.telemetry.metrics import DRAINING
from millstream_server.worker import app
from millstream_testing.waiting import until
from tests.support.media.media_files import solid
from tests.support.wire.failures import refusal
from tests.support.wire.long_streams import NOT_SERVING, SERVING, HealthWatch, watched_health
from tests.support.worker.encode_worker import MODEL, Setup, Stream
from tests.support.worker.hosted_worker import SOON, host_settings

PNG = solid(size=(56, 56))


@dataclass
class Both:
    """A worker with both services."""

    channel: Any
    generator: SimulatedEngine
    tower: SimulatedEncoder
    hosted: HostedEncoder
    leases: list[Leases]
    health: list[HealthWatch]

    async def generate(self) -> list[int]:
        method: Any = decode_pb2_grpc.DecodeServiceStub(self.channel).Decode
        call = method()
        start = generation_pb2.StartGeneration(slot=0, token_ids=[7, 41])
        start.sampling.max_new_tokens = 2
        await call.write(decode_pb2.DecodeRequest(start=start))
        tokens: list[int] = []
        while len(tokens) < 2:
            tokens += (await call.read()).frame.token_ids
        call.cancel()
        return tokens


@contextlib.asynccontextmanager
async def both(**changes: Any) -> AsyncIterator[Both]:
    generator = SimulatedEngine(SimulatedConfig())
    setup = Setup()
    tower = SimulatedEncoder(setup.tower)
    hosted = setup.hosted(tower)
    leases: list[Leases] = []
    plan = make_plan(generator, Role.AGGREGATED, MODEL, DECODE, None)
    plan = with_encoding(plan, hosted, setup.options, leases.append)
    settings = host_settings(**changes)
    code = asyncio.ensure_future(app.run(settings, plan))
    names = ("millstream.v1.DecodeService", "millstream.v1.EncodeService")
    try:
        async with grpc.aio.insecure_channel(settings.listen, SOON) as channel:
            await asyncio.wait_for(channel.channel_ready(), 10)
            async with watched_health(channel, *names) as health:
                for watch in health:
                    await watch.until(SERVING)
                yield Both(channel, generator, tower, hosted, leases, health)
    finally:
        tower.unwedge()
        code.cancel()
        await asyncio.wait({code})
        DRAINING.set(0)


async def test_one_worker_generates_and_encodes_and_says_so() -> None:
    async with both() as one:
        stub: Any = worker_pb2_grpc.WorkerServiceStub(one.channel)
        info = (await stub.GetWorkerInfo(worker_pb2.GetWorkerInfoRequest())).info
        assert info.role == worker_pb2.WORKER_ROLE_AGGREGATED
        assert info.vocab_size == 32000
        assert info.encoder.max_item_tokens == 16384
        stream = Stream(one.channel)
        await stream.start(0, PNG)
        lease = (await stream.encoded(0)).lease
        assert await one.generate() == [42, 43]
        found = one.leases[0].find(lease)
        assert found is not None
        assert found.stored.nbytes == 4 * 8 * 4
        await stream.close()
        await until(lambda: one.hosted.store.pinned_bytes == 0)


async def test_its_results_are_for_nobody_else() -> None:
    async with both() as one:

        async def requests() -> Any:
            yield encode_pb2.FetchRequest(start=encode_pb2.FetchStart())

        method: Any = encode_pb2_grpc.EncodeServiceStub(one.channel).Fetch
        told = await refusal(method(requests()))
        assert (told.code, told.reason) == (
            grpc.StatusCode.INVALID_ARGUMENT,
            "UNSUPPORTED_FEATURE",
        )
        assert "for its own prompts only" in told.message


async def test_items_and_generations_have_limits_of_their_own() -> None:
    async with both(max_open_requests=1) as one:
        one.tower.wedge()
        stream = Stream(one.channel)
        for slot in range(5):
            await stream.start(slot, PNG, cache_salt=str(slot))
        await until(lambda: one.hosted.open_items() == 5)
        assert await one.generate() == [42, 43]
        one.tower.unwedge()
        for slot in range(5):
            await stream.encoded(slot)
        await stream.close()


async def test_a_hang_of_its_tower_makes_it_not_serving() -> None:
    async with both(canary_interval_s=0.1, canary_timeout_s=0.3) as one:
        one.tower.wedge()
        for watch in one.health:
            await watch.until(NOT_SERVING)
        one.tower.unwedge()
        for watch in one.health:
            await watch.until(SERVING)
