"""A worker of any ability in the test's process."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from typing import Any

import grpc

from millstream.v1 import worker_pb2_grpc
from millstream_server.runtime.telemetry.metrics import DRAINING
from millstream_server.worker import app
from millstream_server.worker.host import WorkerPlan
from millstream_server.worker.host_settings import HostSettings
from millstream_testing.waiting import until
from tests.support.processes.ports import free_port
from tests.support.wire.long_streams import SERVING, HealthWatch, server_status, watched_health

SOON = [("grpc.initial_reconnect_backoff_ms", 20)]  # the port may not be open at the first attempt


@dataclass(kw_only=True)
class HostedWorker:
    """A worker that runs here."""

    settings: HostSettings
    code: asyncio.Task[int]
    channel: Any
    health: HealthWatch

    @property
    def about(self) -> Any:
        return worker_pb2_grpc.WorkerServiceStub(self.channel)

    async def conditions(self) -> list[str]:
        return list((await self._status()).health_conditions)

    async def open_requests(self) -> int:
        """Return how many requests are open at the worker."""
        return int((await self._status()).open_work["requests"])

    async def until_open(self, requests: int) -> None:
        """Wait until so many requests are open at the worker."""

        async def reached() -> bool:
            return await self.open_requests() == requests

        await until(reached)

    async def _status(self) -> Any:
        async with grpc.aio.insecure_channel(self.settings.admin_listen) as channel:
            return await server_status(channel)


def host_settings(**changes: Any) -> HostSettings:
    return replace(
        HostSettings(
            listen=f"127.0.0.1:{free_port()}",
            metrics_listen="",
            admin_listen=f"127.0.0.1:{free_port()}",
            canary_interval_s=0,
            propagation_s=0.05,
        ),
        **changes,
    )


@contextlib.asynccontextmanager
async def hosted_worker(
    settings: HostSettings, plan: WorkerPlan[Any], unwedge: Callable[[], None] = lambda: None
) -> AsyncIterator[dict[str, Any]]:
    """Run a worker; yield the fields of a `HostedWorker` once it is SERVING.

    ``unwedge`` ends a hang of its engine, at the end.
    """
    code = asyncio.ensure_future(app.run(settings, plan))
    try:
        async with grpc.aio.insecure_channel(settings.listen, SOON) as channel:
            await asyncio.wait_for(channel.channel_ready(), 10)
            async with watched_health(channel, plan.services[0]) as (health,):
                await health.until(SERVING)
                yield {"settings": settings, "code": code, "channel": channel, "health": health}
    finally:
        unwedge()
        code.cancel()
        await asyncio.wait({code})
        DRAINING.set(0)  # the gauge is this whole process's
