"""A Processor over workers with simulated engines, all traced, in the test's own process."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import grpc

from millstream.v1 import decode_pb2_grpc, prefill_pb2_grpc, processor_pb2_grpc, worker_pb2_grpc
from millstream_server.decode.servicer import DecodeServicer
from millstream_server.engines.base import Role
from millstream_server.engines.simulated import SimulatedConfig, SimulatedEngine
from millstream_server.prefill.servicer import PrefillServicer
from millstream_server.processor.core import ProcessorCore
from millstream_server.processor.pacing import Pacer
from millstream_server.processor.servicer import ProcessorServicer
from millstream_server.processor.text.tokenizer import TextModel
from millstream_server.processor.turn_telemetry import Turns
from millstream_server.routing.policy import LeastLoaded
from millstream_server.routing.pool import WorkerPool
from millstream_server.runtime.reflection import methods_of
from millstream_server.runtime.rpc_interceptor import RpcInterceptor
from millstream_server.runtime.rpc_telemetry import TelemetryServerInterceptor
from millstream_server.runtime.tracing import Tracing
from millstream_server.transfer.ticket import TicketGate
from millstream_server.worker.core import WorkerCore
from millstream_server.worker.info import WorkerInfoServicer
from millstream_server.worker.request_telemetry import WorkerTelemetry
from millstream_server.worker_stream.start import LONG_STREAMS
from tests.support.in_process import ALPHABET, KEY, MODEL
from tests.support.spans import SpanLog
from tests.support.waiting import until


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
    core: WorkerCore
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


@contextlib.asynccontextmanager
async def _serving(
    tracing: Tracing | None, add: Callable[[grpc.aio.Server], None]
) -> AsyncIterator[tuple[grpc.aio.Server, str]]:
    telemetry = TelemetryServerInterceptor(tracing, served=SERVED, without_spans=LONG_STREAMS)
    server = grpc.aio.server(interceptors=[telemetry, RpcInterceptor()])
    add(server)
    port = server.add_insecure_port("127.0.0.1:0")
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
    engine, role = KeepingEngine(config), config.role
    gate = None if role is Role.AGGREGATED else TicketGate(KEY)
    core = WorkerCore(engine, role, gate, WorkerTelemetry(role, MODEL, tracing))
    about = WorkerInfoServicer(engine, role, MODEL, core.work)

    def add(server: grpc.aio.Server) -> None:
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(about, server)
        if role is Role.PREFILL:
            prefill_pb2_grpc.add_PrefillServiceServicer_to_server(PrefillServicer(core), server)
        else:
            decode_pb2_grpc.add_DecodeServiceServicer_to_server(DecodeServicer(core), server)

    info = await engine.start(lambda _: None)
    core.ready(info)
    about.ready(info)
    async with _serving(tracing, add) as (server, address):
        try:
            yield TracedWorker(engine, core, server, address)
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
        pool = WorkerPool([worker.address for worker in workers], LeastLoaded, lambda: None)
        pacer = Pacer(0.05)
        core = ProcessorCore({MODEL: text_model}, pool, pacer, KEY, 2)
        stack.callback(core.close)
        stack.push_async_callback(pool.close)
        stack.push_async_callback(pacer.close)
        pool.open()
        pacer.open()
        servicer = ProcessorServicer(core, Turns(tracing))

        def add(server: grpc.aio.Server) -> None:
            processor_pb2_grpc.add_ProcessorServiceServicer_to_server(servicer, server)

        _, address = await stack.enter_async_context(_serving(tracing, add))
        channel: Any = await stack.enter_async_context(grpc.aio.insecure_channel(address))
        await until(lambda: sum(pool.connected(MODEL).values()) == len(workers))
        if spans:
            spans.forget()
        yield TracedSuite(processor_pb2_grpc.ProcessorServiceStub(channel), core, workers)
