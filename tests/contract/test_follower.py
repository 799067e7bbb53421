"""A worker process that runs a part of a model: health and metrics, no requests, and its end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from millstream.v1 import decode_pb2_grpc, worker_pb2, worker_pb2_grpc
from millstream_server.control.engine import Role
from millstream_server.runtime.errors import EngineFailedError
from millstream_server.runtime.telemetry.metrics import MODEL_LOAD
from millstream_server.worker import follower
from millstream_server.worker.host_settings import ModelSettings
from tests.support.processes.ports import free_port
from tests.support.telemetry.scraping import scrape

_SERVICE = "millstream.v1.DecodeService"
_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@dataclass
class Part:
    """A part of a model whose load and end the test decides."""

    loaded: asyncio.Event = field(default_factory=asyncio.Event)
    fails: bool = False
    closed: int = 0
    on_end: Callable[[str], None] | None = None

    async def start(self, on_end: Callable[[str], None]) -> None:
        await self.loaded.wait()
        if self.fails:
            raise EngineFailedError("no room")
        self.on_end = on_end

    async def close(self) -> None:
        self.closed += 1


@dataclass
class Process:
    part: Part
    task: asyncio.Task[int]
    health: health_pb2_grpc.HealthStub
    channel: grpc.aio.Channel
    metrics: int

    async def is_serving(self, service: str = _SERVICE) -> bool:
        request = health_pb2.HealthCheckRequest(service=service)
        status = (await self.health.Check(request, wait_for_ready=True, timeout=10)).status
        assert status in (_SERVING, _NOT_SERVING)
        return bool(status == _SERVING)

    async def until(self, *, serving: bool) -> None:
        async with asyncio.timeout(10):
            request = health_pb2.HealthCheckRequest(service=_SERVICE)
            async for each in self.health.Watch(request, wait_for_ready=True):
                if (each.status == _SERVING) is serving:
                    return

    async def code(self) -> int:
        return await asyncio.wait_for(self.task, 10)


@contextlib.asynccontextmanager
async def _running(drain_s: float = 30.0) -> AsyncIterator[Process]:
    address, metrics = f"127.0.0.1:{free_port()}", free_port()
    settings = ModelSettings(
        listen=address,
        metrics_listen=f"127.0.0.1:{metrics}",
        model_name="m",
        drain_s=drain_s,
        propagation_s=0.0,
    )
    part = Part()
    task = asyncio.ensure_future(follower.run(settings, part, Role.DECODE, _SERVICE))
    async with grpc.aio.insecure_channel(address) as channel:
        process = Process(part, task, health_pb2_grpc.HealthStub(channel), channel, metrics)
        try:
            yield process
        finally:
            if not task.done():
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            assert part.closed == 1


async def test_it_has_the_workers_health_and_metrics_and_no_requests() -> None:
    MODEL_LOAD.clear()
    async with _running() as process:
        assert not await process.is_serving()
        assert await process.is_serving("liveness")
        process.part.loaded.set()
        await process.until(serving=True)
        assert await process.is_serving("")
        found = await scrape(process.metrics)
        assert found.value("millstream_serving", service=_SERVICE) == 1
        assert found.value("millstream_model_load_seconds", phase="starting") > 0
        info = worker_pb2_grpc.WorkerServiceStub(process.channel).GetWorkerInfo
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await info(worker_pb2.GetWorkerInfoRequest())
        assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
        stub: Any = decode_pb2_grpc.DecodeServiceStub(process.channel)
        stream = stub.Decode()
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stream.read()
        assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_the_end_of_its_engine_is_a_failure() -> None:
    async with _running() as process:
        process.part.loaded.set()
        await process.until(serving=True)
        assert process.part.on_end is not None
        process.part.on_end("process 7 ended")
        process.part.on_end("process 8 ended")
        assert await process.code() == 1


async def test_an_engine_that_does_not_start_is_a_failure() -> None:
    async with _running() as process:
        process.part.fails = True
        process.part.loaded.set()
        assert await process.code() == 1


async def test_after_a_signal_it_waits_for_the_leader() -> None:
    async with _running() as process:
        process.part.loaded.set()
        await process.until(serving=True)
        os.kill(os.getpid(), signal.SIGTERM)
        await process.until(serving=False)
        assert not process.task.done(), "the leader may still answer requests"
        assert process.part.on_end is not None
        process.part.on_end("the leader stopped it")
        assert await process.code() == 0


async def test_a_second_signal_ends_the_wait() -> None:
    async with _running() as process:
        process.part.loaded.set()
        await process.until(serving=True)
        os.kill(os.getpid(), signal.SIGTERM)
        await process.until(serving=False)
        os.kill(os.getpid(), signal.SIGTERM)
        assert await process.code() == 0


async def test_a_signal_during_the_load_ends_it() -> None:
    async with _running() as process:
        assert not await process.is_serving()
        os.kill(os.getpid(), signal.SIGTERM)
        assert await process.code() == 0
