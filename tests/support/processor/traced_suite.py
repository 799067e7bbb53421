"""A Processor over workers with simulated engines, all traced, in the test's own process."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import grpc

from millstream.v1 import processor_pb2_grpc
from millstream_server.control.engine import Role
from millstream_server.engines.simulated.engine import SimulatedConfig, SimulatedEngine
from millstream_server.generation.generator import GeneratorInfo
from millstream_server.processor.core import ProcessorCore
from millstream_server.processor.output import Pacer
from millstream_server.processor.servicer import ProcessorServicer
from millstream_server.processor.telemetry import FrontTelemetry
from millstream_server.processor.text.tokenizer import TextModel
from millstream_server.runtime.lifecycle.conditions import HealthConditions
from millstream_server.runtime.rpc.reflection import methods_of
from millstream_server.runtime.rpc.server_telemetry import TelemetryLayer
from millstream_server.runtime.telemetry.tracing import Tracing
from millstream_server.worker.host import WorkerHost
from millstream_server.worker.servicer import LONG_STREAMS
from millstream_testing.in_process import ALPHABET, MODEL, hosted, make_core, make_fleet
from millstream_testing.waiting import until
from tests.support.telemetry.spans import SpanLog
from tests.support.wire.transports import new_server


class KeepingEngine(SimulatedEngine):
    """Keeps the requests it was given."""

    def __init__(self, config: SimulatedConfig) -> None:
        super().__init__(config)
        self.requests: list[Any] = []

    def submit(self, request: Any, sink: Any) -> None:
        self.requests.append(request)
        super().submit(request, sink)


@dataclass
class TracedWorker:
    """A worker and the server in front of it."""

    engine: KeepingEngine
    host: WorkerHost[GeneratorInfo]
    server: grpc.aio.Server
    address: str


@dataclass
class TracedSuite:
    """Everything a test may want to break."""

    stub: Any
    core: ProcessorCore
    workers: Sequence[TracedWorker]


SERVED = [
    method
    for name in ("ProcessorService", "PrefillService", "DecodeService", "WorkerService")
    for method in methods_of(f"millstream.v1.{name}")
]

_LONG_STREAMS = LONG_STREAMS | {
    "millstream.v1.PrefillService/Prefill",
    "millstream.v1.DecodeService/Decode",
}


@contextlib.asynccontextmanager
async def _serving(
    tracing: Tracing | None, add: Callable[[grpc.aio.Server], None]
) -> AsyncIterator[tuple[grpc.aio.Server, str]]:
    telemetry = TelemetryLayer(tracing, served=SERVED, without_spans=_LONG_STREAMS)
    server = new_server(telemetry)
    add(server)
    port = server.bind("127.0.0.1:0")
    await server.start()
    try:
        yield server, f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


@contextlib.asynccontextmanager
async def traced_worker(
    tracing: Tracing | None, config: SimulatedConfig = ALPHABET
) -> AsyncIterator[TracedWorker]:
    """Serve one worker."""
    engine = KeepingEngine(config)
    host = hosted(engine, config.role, tracing)

    def add(server: grpc.aio.Server) -> None:
        host.attach(server, HealthConditions(lambda _: None))

    async with _serving(tracing, add) as (server, address):
        try:
            host.ready(await engine.start(lambda _: None))
            yield TracedWorker(engine, host, server, address)
        finally:
            await engine.close()


@contextlib.asynccontextmanager
async def traced_suite(
    text_model: TextModel,
    spans: SpanLog | None,
    *,
    roles: Sequence[Role] = (Role.AGGREGATED,),
    config: SimulatedConfig = ALPHABET,
) -> AsyncIterator[TracedSuite]:
    """Serve a Processor over one worker of each of these roles; ``spans`` has none of the start."""
    tracing = spans.tracing if spans else None
    async with contextlib.AsyncExitStack() as stack:
        workers = [
            await stack.enter_async_context(traced_worker(tracing, replace(config, role=role)))
            for role in roles
        ]
        router, fleet = make_fleet([worker.address for worker in workers])
        pacer = Pacer(0.05)
        core = make_core(
            {MODEL: text_model}, router, fleet, pacer, telemetry=FrontTelemetry(tracing)
        )
        stack.callback(core.prompts.close)
        stack.push_async_callback(fleet.close)
        stack.push_async_callback(pacer.close)
        fleet.open()
        pacer.open()
        servicer = ProcessorServicer(core)

        def add(server: grpc.aio.Server) -> None:
            processor_pb2_grpc.add_ProcessorServiceServicer_to_server(servicer, server)

        _, address = await stack.enter_async_context(_serving(tracing, add))
        channel: Any = await stack.enter_async_context(grpc.aio.insecure_channel(address))
        await until(lambda: sum(router.connected(MODEL).values()) == len(workers))
        if spans:
            spans.forget()
        yield TracedSuite(processor_pb2_grpc.ProcessorServiceStub(channel), core, workers)
