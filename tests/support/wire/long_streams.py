"""The streams that stand open as long as a server does: health, load, reflection, and so on.

With them, what operators ask a server meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf.duration_pb2 import Duration
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from millstream.orca import service_pb2, service_pb2_grpc
from millstream.v1 import admin_pb2, admin_pb2_grpc, worker_pb2, worker_pb2_grpc
from millstream_testing.waiting import EOF, until

SERVING: int = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING: int = health_pb2.HealthCheckResponse.NOT_SERVING


@dataclass
class HealthWatch:
    """One name's health, as it was told."""

    name: str
    told: list[int] = field(default_factory=list)
    ended: grpc.StatusCode | None = None

    async def follow(self, stub: Any) -> None:
        request = health_pb2.HealthCheckRequest(service=self.name)
        try:
            async for answer in stub.Watch(request):
                self.told.append(answer.status)
        except grpc.aio.AioRpcError as error:
            self.ended = error.code()

    async def until(self, status: int, within_s: float = 10.0) -> None:
        """Wait until this was the last that was told."""
        await until(lambda: self.told[-1:] == [status], within_s)


@contextlib.asynccontextmanager
async def watched_health(
    channel: grpc.aio.Channel, *names: str
) -> AsyncIterator[list[HealthWatch]]:
    """Watch these names; each has been told its first status."""
    stub = health_pb2_grpc.HealthStub(channel)
    watches = [HealthWatch(name) for name in names]
    tasks = [asyncio.ensure_future(watch.follow(stub)) for watch in watches]
    try:
        await until(lambda: all(watch.told for watch in watches))
        yield watches
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


@contextlib.asynccontextmanager
async def standing_streams(channel: grpc.aio.Channel, *, load: bool) -> AsyncIterator[None]:
    """Keep a reflection and an ORCA stream open, with ``load`` WatchLoad too; each has answered."""
    reflection = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo()
    await reflection.write(reflection_pb2.ServerReflectionRequest(list_services=""))
    calls: list[Any] = [
        reflection,
        service_pb2_grpc.OpenRcaServiceStub(channel).StreamCoreMetrics(
            service_pb2.OrcaLoadReportRequest()
        ),
    ]
    if load:
        watch: Any = worker_pb2_grpc.WorkerServiceStub(channel).WatchLoad
        calls.append(watch(worker_pb2.WatchLoadRequest()))
    try:
        for call in calls:
            assert await call.read() is not EOF
        yield
    finally:
        for call in calls:
            call.cancel()


async def server_status(channel: grpc.aio.Channel) -> admin_pb2.ServerStatus:
    """Ask an admin address."""
    stub: Any = admin_pb2_grpc.AdminServiceStub(channel)
    answer = await stub.GetServerStatus(admin_pb2.GetServerStatusRequest())
    status: admin_pb2.ServerStatus = answer.status
    return status


class LoadWatch:
    """The newest report of one worker, every 100 ms."""

    def __init__(self) -> None:
        self.last: worker_pb2.LoadReport | None = None
        self._changed = asyncio.Condition()

    async def until(
        self, condition: Callable[[worker_pb2.LoadReport], bool], within_s: float
    ) -> worker_pb2.LoadReport:
        """Wait for a report that satisfies ``condition``."""
        try:
            async with asyncio.timeout(within_s), self._changed:
                while self.last is None or not condition(self.last):
                    await self._changed.wait()
        except TimeoutError:
            message = f"not within {within_s} s; the last report is {self.last}"
            raise AssertionError(message) from None
        return self.last

    async def idle(self, within_s: float) -> None:
        """Wait until nothing runs, nothing queues and every KV block is free."""
        await self.until(
            lambda load: not (load.running_requests or load.queued_requests or load.used_blocks),
            within_s,
        )

    async def busy(self, within_s: float) -> None:
        """Wait until something runs or queues."""
        await self.until(lambda load: bool(load.running_requests or load.queued_requests), within_s)

    async def follow(self, stub: worker_pb2_grpc.WorkerServiceStub) -> None:
        interval = Duration()
        interval.FromMilliseconds(100)
        async for response in stub.WatchLoad(worker_pb2.WatchLoadRequest(interval=interval)):
            async with self._changed:
                self.last = response.load
                self._changed.notify_all()


@contextlib.asynccontextmanager
async def load_of(address: str) -> AsyncIterator[LoadWatch]:
    """Follow a worker's load."""
    async with grpc.aio.insecure_channel(address) as channel:
        watch = LoadWatch()
        task = asyncio.ensure_future(watch.follow(worker_pb2_grpc.WorkerServiceStub(channel)))
        try:
            yield watch
        finally:
            task.cancel()
            await asyncio.wait([task])
