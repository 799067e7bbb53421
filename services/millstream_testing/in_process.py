"""Servers inside the test's own process, on real sockets, each with the least a test needs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc

from millstream.v1 import (
    decode_pb2_grpc,
    diffusion_pb2_grpc,
    embedding_pb2_grpc,
    prefill_pb2_grpc,
    processor_pb2_grpc,
    worker_pb2_grpc,
)
from millstream_server.control.engine import Role
from millstream_server.encode.transfer.ticket import EmbeddingTickets
from millstream_server.engines.simulated.engine import SimulatedConfig, SimulatedEngine
from millstream_server.generation.generator import GeneratorEngine, GeneratorInfo
from millstream_server.generation.ticket import TicketGate, TicketKey
from millstream_server.generation.worker.app import make_plan
from millstream_server.generation.worker.fetching import Fetcher
from millstream_server.generation.worker.servicer import DECODE, PREFILL
from millstream_server.generation.worker.servicer import DIFFUSION as TEXT_DIFFUSION
from millstream_server.links.fleet import Fleet
from millstream_server.processor import app
from millstream_server.processor.core import ProcessorCore
from millstream_server.processor.front import Front
from millstream_server.processor.media.core import ProcessorMedia
from millstream_server.processor.media.intake import Intake
from millstream_server.processor.media.uploads import MediaBudget
from millstream_server.processor.media.urls import UrlFetcher
from millstream_server.processor.models import ModelNames, Models
from millstream_server.processor.output import Pacer
from millstream_server.processor.prompts import Prompts
from millstream_server.processor.redispatch import Redispatcher
from millstream_server.processor.telemetry import FrontTelemetry
from millstream_server.processor.text.tokenizer import TextModel
from millstream_server.processor.turn import TurnParts
from millstream_server.routing.discovery.sources import StaticDiscovery
from millstream_server.routing.kv_aware import make_policy
from millstream_server.routing.policy import PolicyName
from millstream_server.routing.router import Router
from millstream_server.runtime.lifecycle.server import Server, ServerOptions
from millstream_server.runtime.telemetry.tracing import Tracing
from millstream_server.runtime.transport.options import TransportOptions
from millstream_server.runtime.work.fair_queue import PoolLimits
from millstream_server.worker.host import WorkerHost, WorkerPlan
from millstream_server.worker.servicer import SERVICE as WORKER
from millstream_testing import alphabet
from millstream_testing.waiting import until

MODEL = "tiny"
VOCAB_SIZE = alphabet.VOCAB_SIZE
CONTEXT_LENGTH = 512
KEY = TicketKey(bytes(range(32)))
MAX_ITEM_BYTES = 4 << 20

ALPHABET = SimulatedConfig(vocab_size=VOCAB_SIZE, context_length=CONTEXT_LENGTH)
"""For the tokenizer of `alphabet_model`."""


def _stub(kind: Any) -> Any:
    """Make a property: a service's stub on the channel."""
    return property(lambda self: kind(self.channel))


@dataclass
class _InProcess:
    server: Server
    port: int
    channel: Any

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"


@dataclass
class InProcessWorker(_InProcess):
    """A worker with a simulated engine."""

    engine: SimulatedEngine
    host: WorkerHost[GeneratorInfo]

    decode = _stub(decode_pb2_grpc.DecodeServiceStub)
    prefill = _stub(prefill_pb2_grpc.PrefillServiceStub)
    diffusion = _stub(diffusion_pb2_grpc.DiffusionServiceStub)
    about = _stub(worker_pb2_grpc.WorkerServiceStub)

    async def load(self) -> GeneratorInfo:
        info = await self.host.plan.engine.start(lambda _: None)
        self.host.ready(info)  # not warmed up: some tests' engines take minutes for a token
        return info

    async def until_idle(self, within_s: float = 1.0) -> None:
        """Wait until nothing runs, nothing queues and every KV block is free."""

        async def idle() -> bool:
            load = await self.engine.load()
            return not (load.running_requests or load.queued_requests or load.used_blocks)

        await until(idle, within_s)

    async def until_running(self, count: int) -> None:

        async def running() -> bool:
            return (await self.engine.load()).running_requests == count

        await until(running)


def hosted(
    engine: GeneratorEngine, role: Role, tracing: Tracing | None = None
) -> WorkerHost[GeneratorInfo]:
    """Put an engine on the host that its role's process has."""
    return WorkerHost(plan_of(engine, role), tracing=tracing)


def plan_of(
    engine: GeneratorEngine, role: Role, fetcher: Fetcher | None = None
) -> WorkerPlan[GeneratorInfo]:
    """Make the plan that the role's process has."""
    gate = TicketGate(KEY) if role.hands_off else None
    service = {Role.PREFILL: PREFILL, Role.DIFFUSION: TEXT_DIFFUSION}.get(role, DECODE)
    return make_plan(engine, role, MODEL, service, gate, fetcher=fetcher)


@contextlib.asynccontextmanager
async def worker(
    config: SimulatedConfig = ALPHABET,
    *,
    loaded: bool = True,
    fetcher: Fetcher | None = None,
    make: Callable[[SimulatedEngine, Role], WorkerPlan[GeneratorInfo]] | None = None,
) -> AsyncIterator[InProcessWorker]:
    """Serve what a worker process serves; with ``loaded`` False it is still loading."""
    engine = SimulatedEngine(config)
    make = make or partial(plan_of, fetcher=fetcher)
    host = WorkerHost(make(engine, config.role))
    server = Server(
        (*host.plan.services, WORKER),
        ServerOptions(max_receive_bytes=host.plan.max_receive_bytes, load=host.requests.meter),
    )
    host.attach(server.methods, server.conditions)
    port = await server.listen("127.0.0.1:0")
    async with grpc.aio.insecure_channel(
        f"127.0.0.1:{port}", options=[("grpc.max_send_message_length", -1)]
    ) as channel:
        started = InProcessWorker(server, port, channel, engine, host)
        try:
            if loaded:
                await started.load()
            yield started
        finally:
            await server.stop(0)
            await host.plan.engine.close()


@dataclass
class InProcessProcessor(_InProcess):
    """A Processor."""

    core: ProcessorCore
    router: Router
    pacer: Pacer

    stub = _stub(processor_pb2_grpc.ProcessorServiceStub)
    diffusion = _stub(diffusion_pb2_grpc.DiffusionServiceStub)
    embedding = _stub(embedding_pb2_grpc.EmbeddingServiceStub)


def make_fleet(workers: Sequence[str], tracing: Tracing | None = None) -> tuple[Router, Fleet]:
    """Make a router of the default policy and its links to the workers at these addresses."""
    router = Router(lambda: make_policy(PolicyName.LEAST_LOADED))
    return router, Fleet(StaticDiscovery(workers), router, tracing=tracing)


def make_core(
    models: Mapping[str, TextModel | None],
    router: Router,
    fleet: Fleet,
    pacer: Pacer,
    *,
    names: ModelNames | None = None,
    formats: Mapping[str, str] | None = None,
    **options: Any,
) -> ProcessorCore:
    """Make a Processor's core; ``options`` are keyword arguments of its `Front`."""
    prompts = Prompts(PoolLimits())
    urls = UrlFetcher(enabled=False, hosts=(), max_bytes=MAX_ITEM_BYTES, pool=prompts.threads)
    intake = Intake(urls, max_item_bytes=MAX_ITEM_BYTES, max_items=8)
    budget = MediaBudget(4 * MAX_ITEM_BYTES)
    front = Front(Models(models, router, names, formats or {}), router, **options)
    redispatch = Redispatcher(router.plan, front.running, front.repeated)
    return ProcessorCore(
        front,
        prompts,
        TurnParts(pacer=pacer, workers=fleet, ticket_key=KEY, redispatch=redispatch),
        ProcessorMedia(router, fleet, intake, budget, tickets=EmbeddingTickets(KEY)),
    )


@contextlib.asynccontextmanager
async def processor(
    models: Mapping[str, TextModel | None],
    workers: Sequence[str],
    *,
    wait: bool = True,
    tracing: Tracing | None = None,
    **options: Any,
) -> AsyncIterator[InProcessProcessor]:
    """Serve what a Processor process serves, on the workers at these addresses.

    ``wait`` for all of the workers before the test goes on; ``options`` are those of `make_core`.
    """
    changed = asyncio.Event()
    router, fleet = make_fleet(workers, tracing)
    router.watch(changed.set)
    pacer = Pacer(0.05)
    core = make_core(models, router, fleet, pacer, telemetry=FrontTelemetry(tracing), **options)
    server = Server(
        app.SERVICES,
        ServerOptions(
            max_receive_bytes=4 << 20,
            clients=TransportOptions(max_receive_bytes=4 << 20),
            pool=core.prompts.threads,
            load=core.front.meter,
            tracing=tracing,
        ),
    )
    app.add_services(server, core, fleet)
    port = await server.listen("127.0.0.1:0")
    fleet.open()
    pacer.open()
    health = asyncio.ensure_future(app.follow_readiness(core, server, changed))
    async with grpc.aio.insecure_channel(
        f"127.0.0.1:{port}", options=[("grpc.max_send_message_length", -1)]
    ) as channel:
        try:
            if wait:
                await until(
                    lambda: sum(sum(router.connected(m).values()) for m in models) == len(workers)
                )
            yield InProcessProcessor(server, port, channel, core, router, pacer)
        finally:
            health.cancel()
            await server.stop(0)
            await pacer.close()
            await fleet.close()
            core.prompts.close()


@contextlib.asynccontextmanager
async def suite(
    text_model: TextModel, config: SimulatedConfig = ALPHABET
) -> AsyncIterator[tuple[InProcessProcessor, InProcessWorker]]:
    """One Processor over one aggregated worker."""
    async with worker(config) as one, processor({MODEL: text_model}, [one.address]) as front:
        yield front, one
