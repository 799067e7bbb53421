"""Servers inside the test's own process, on real sockets, each with the least a test needs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from millstream.v1 import (
    decode_pb2_grpc,
    prefill_pb2_grpc,
    processor_pb2_grpc,
    worker_pb2_grpc,
)
from millstream_server.decode.servicer import DecodeServicer
from millstream_server.engines.base import EngineInfo, EngineLoad, Role
from millstream_server.engines.simulated import SimulatedConfig, SimulatedEngine
from millstream_server.prefill.servicer import PrefillServicer
from millstream_server.processor import app
from millstream_server.processor.core import ProcessorCore
from millstream_server.processor.pacing import Pacer
from millstream_server.processor.servicer import ProcessorServicer
from millstream_server.processor.text.tokenizer import TextModel
from millstream_server.routing.policy import LeastLoaded
from millstream_server.routing.pool import WorkerPool
from millstream_server.runtime.server import Server, ServerOptions
from millstream_server.transfer.ticket import TicketGate, TicketKey
from millstream_server.worker.core import WorkerCore
from millstream_server.worker.info import WorkerInfoServicer
from tests.support.waiting import until

MODEL = "tiny"
VOCAB_SIZE = 440
CONTEXT_LENGTH = 512
KEY = TicketKey(bytes(range(32)))

ALPHABET = SimulatedConfig(vocab_size=VOCAB_SIZE, context_length=CONTEXT_LENGTH)
"""For the tokenizer of `conftest.text_model`."""


@dataclass
class InProcessWorker:
    """A worker with a simulated engine."""

    engine: SimulatedEngine
    core: WorkerCore
    server: Server
    info: WorkerInfoServicer
    port: int
    channel: Any

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def decode(self) -> Any:
        return decode_pb2_grpc.DecodeServiceStub(self.channel)

    @property
    def prefill(self) -> Any:
        return prefill_pb2_grpc.PrefillServiceStub(self.channel)

    @property
    def about(self) -> Any:
        return worker_pb2_grpc.WorkerServiceStub(self.channel)

    async def load(self) -> EngineInfo:
        """Load the model and take requests."""
        info = await self.engine.start(lambda _: None)
        self.core.ready(info)
        self.info.ready(info)
        self.server.set_serving(serving=True)
        return info

    async def until_idle(self, within_s: float = 1.0) -> None:
        """Wait until nothing runs, nothing queues and every KV block is free."""

        async def idle() -> bool:
            load = await self.engine.load()
            return load == EngineLoad(
                running_requests=0,
                queued_requests=0,
                used_blocks=0,
                total_blocks=load.total_blocks,
            )

        await until(idle, within_s)

    async def until_running(self, count: int) -> None:
        """Wait until the engine works on so many requests."""

        async def running() -> bool:
            return (await self.engine.load()).running_requests == count

        await until(running)


@contextlib.asynccontextmanager
async def worker(
    config: SimulatedConfig = ALPHABET, *, loaded: bool = True
) -> AsyncIterator[InProcessWorker]:
    """Serve what a worker process serves; with ``loaded`` False it is still loading."""
    engine = SimulatedEngine(config)
    role = config.role
    gate = None if role is Role.AGGREGATED else TicketGate(KEY)
    core = WorkerCore(engine, role, gate)
    name = "PrefillService" if role is Role.PREFILL else "DecodeService"
    server = Server(
        (f"millstream.v1.{name}", "millstream.v1.WorkerService"),
        ServerOptions(max_receive_bytes=32 << 20, load=core.meter),
    )
    info = WorkerInfoServicer(engine, role, MODEL, core.work)
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(info, server.grpc)
    if role is Role.PREFILL:
        prefill_pb2_grpc.add_PrefillServiceServicer_to_server(PrefillServicer(core), server.grpc)
    else:
        decode_pb2_grpc.add_DecodeServiceServicer_to_server(DecodeServicer(core), server.grpc)
    port = await server.listen("127.0.0.1:0")
    async with grpc.aio.insecure_channel(
        f"127.0.0.1:{port}", options=[("grpc.max_send_message_length", -1)]
    ) as channel:
        started = InProcessWorker(engine, core, server, info, port, channel)
        try:
            if loaded:
                await started.load()
            yield started
        finally:
            await server.stop(0)
            await engine.close()


@dataclass
class InProcessProcessor:
    """A Processor."""

    core: ProcessorCore
    pool: WorkerPool
    pacer: Pacer
    server: Server
    port: int
    channel: Any

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def stub(self) -> Any:
        return processor_pb2_grpc.ProcessorServiceStub(self.channel)


@contextlib.asynccontextmanager
async def processor(
    models: Mapping[str, TextModel], workers: Sequence[str], *, wait: bool = True
) -> AsyncIterator[InProcessProcessor]:
    """Serve what a Processor process serves, on the workers at these addresses.

    ``wait`` for all of the workers before the test goes on.
    """
    changed = asyncio.Event()
    pool = WorkerPool(workers, LeastLoaded, changed.set)
    pacer = Pacer(0.05)
    core = ProcessorCore(dict(models), pool, pacer, KEY, 2)
    server = Server((app.SERVICE,), ServerOptions(max_receive_bytes=4 << 20, load=core.meter))
    processor_pb2_grpc.add_ProcessorServiceServicer_to_server(ProcessorServicer(core), server.grpc)
    port = await server.listen("127.0.0.1:0")
    pool.open()
    pacer.open()
    health = asyncio.ensure_future(app.follow_readiness(core, server, changed))
    async with grpc.aio.insecure_channel(
        f"127.0.0.1:{port}", options=[("grpc.max_send_message_length", -1)]
    ) as channel:
        try:
            if wait:
                await until(
                    lambda: sum(sum(pool.connected(m).values()) for m in models) == len(workers)
                )
            yield InProcessProcessor(core, pool, pacer, server, port, channel)
        finally:
            health.cancel()
            await server.stop(0)
            await pacer.close()
            await pool.close()
            core.close()


@contextlib.asynccontextmanager
async def suite(
    text_model: TextModel, config: SimulatedConfig = ALPHABET
) -> AsyncIterator[tuple[InProcessProcessor, InProcessWorker]]:
    """One Processor over one aggregated worker."""
    async with worker(config) as one, processor({MODEL: text_model}, [one.address]) as front:
        yield front, one
