"""EncodeService beside another service in one process: for engines that run the tower themselves.

Such a worker makes pixels of its own prompts' images: no other process has to, and none gets them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Generic

from prometheus_client.core import Metric

from millstream.v1 import worker_pb2
from millstream_server.engines.base import EngineLoad, Role, WorkerDescription
from millstream_server.runtime.errors import ServingError
from millstream_server.runtime.rpc.serving import ServicerTable
from millstream_server.transfer.embeddings.leases import Leases
from millstream_server.worker.encoding.engine import HostedEncoder
from millstream_server.worker.encoding.service import Serving, add_service
from millstream_server.worker.encoding.servicer import SERVICE, STREAM
from millstream_server.worker.engine_metrics import MetricsSource
from millstream_server.worker.host import HostedEngine, InfoT, WorkerHost, WorkerPlan
from millstream_server.worker.open_requests import (
    DEFAULT_TIMES,
    Described,
    OpenLimits,
    OpenRequests,
)


def with_encoding(
    plan: WorkerPlan[InfoT],
    encoder: HostedEncoder,
    serving: Serving,
    on_leases: Callable[[Leases], None] = lambda _: None,
) -> WorkerPlan[InfoT]:
    """Return ``plan`` with EncodeService added.

    ``on_leases`` gets the leases when the services are added, before ``plan`` adds its own: the
    other service reads results from them without a fetch.
    """
    engines = _Engines(plan.engine, encoder)

    def add(host: WorkerHost[InfoT], server: ServicerTable) -> None:
        described = Described("encode", Role.ENCODE, plan.model)
        requests = OpenRequests(host.work, described, host.tracing, lambda: 0.0)
        engines.requests = requests
        worker = add_service(server, encoder, requests, host.streams, serving)
        on_leases(worker.leases)
        plan.add(host, server)

    def describe(description: WorkerDescription) -> worker_pb2.WorkerInfo:
        return plan.describe(replace(description, encoder=encoder.info))

    return replace(
        plan,
        engine=engines,
        services=(*plan.services, SERVICE),
        add=add,
        describe=describe,
        without_spans=(*plan.without_spans, STREAM),
    )


class _Engines(Generic[InfoT]):
    """Two engines as one `HostedEngine`, described by the main one."""

    def __init__(self, main: HostedEngine[InfoT], encoder: HostedEncoder) -> None:
        self.requests: OpenRequests | None = None
        self._main = main
        self._encoder = encoder

    async def start(self, on_failure: Callable[[ServingError], None]) -> InfoT:
        """Start the main one first: it may take all that is left of a GPU's memory."""
        main_info = await self._main.start(on_failure)
        info = await self._encoder.start(on_failure)
        if self.requests is not None:
            most = DEFAULT_TIMES * info.max_running_requests
            self.requests.limits = OpenLimits(max_requests=most)
        return main_info

    async def warm_up(self) -> None:
        await self._main.warm_up()
        await self._encoder.warm_up()

    async def load(self) -> EngineLoad:
        return await self._main.load()

    async def close(self) -> None:
        try:
            await self._encoder.close()
        finally:
            await self._main.close()

    def progress(self, dp_rank: int) -> int:
        """Return the main engine's: progress of one must not hide that the other hangs."""
        return self._main.progress(dp_rank)

    async def probe(self, dp_rank: int) -> None:
        probes = [self._main.probe(dp_rank)]
        if dp_rank == 0:
            probes.append(self._encoder.probe(0))
        await asyncio.gather(*probes)

    def metrics(self) -> Iterable[Metric]:
        for engine in (self._main, self._encoder):
            if isinstance(engine, MetricsSource):
                yield from engine.metrics()
