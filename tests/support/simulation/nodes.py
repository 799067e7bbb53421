"""The nodes of a simulated suite: real Processors and workers, each in tasks of its own."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from grpc_health.v1 import health_pb2_grpc

from millstream.v1 import processor_pb2_grpc
from millstream_server.control.engine import Role
from millstream_server.engines.simulated.adapter import SimulatedConfig
from millstream_server.generation.ticket import TicketGate, TicketKey
from millstream_server.generation.worker.app import make_plan
from millstream_server.generation.worker.servicer import DECODE, DIFFUSION, PREFILL
from millstream_server.links.fleet import Fleet
from millstream_server.links.unread import UnreadOutput
from millstream_server.processor.admission import QueueLimits
from millstream_server.processor.core import ProcessorCore
from millstream_server.processor.front import Front
from millstream_server.processor.media.core import ProcessorMedia
from millstream_server.processor.media.intake import Intake
from millstream_server.processor.media.uploads import MediaBudget
from millstream_server.processor.media.urls import UrlFetcher
from millstream_server.processor.models import Models
from millstream_server.processor.output import Pacer
from millstream_server.processor.prompts import Prompts
from millstream_server.processor.redispatch import Redispatcher
from millstream_server.processor.requests import RequestLimits
from millstream_server.processor.servicer import ProcessorServicer
from millstream_server.processor.text.tokenizer import TextModel
from millstream_server.processor.turn import TurnParts
from millstream_server.routing.discovery.sources import Addresses, round_s
from millstream_server.routing.kv_aware import make_policy
from millstream_server.routing.plan import Handoff, HandoffMode
from millstream_server.routing.policy import PolicyName
from millstream_server.routing.router import Router
from millstream_server.runtime.lifecycle.conditions import HealthConditions
from millstream_server.runtime.rpc.health import HealthServicer
from millstream_server.runtime.rpc.serving import MethodTable, Rpcs, ServicerTable
from millstream_server.runtime.work.fair_queue import PoolLimits
from millstream_server.worker.canary import CanaryTimes, EngineWatch
from millstream_server.worker.host import WorkerHost
from millstream_testing.alphabet import VOCAB_SIZE
from tests.support.simulation.clock import SimulatedLoop
from tests.support.simulation.engine import Machine, TellingEngine
from tests.support.simulation.network import NODE, Network
from tests.support.simulation.requests import MODEL
from tests.support.simulation.rpc import SimulatedChannel

BOOTSTRAP_PORT = 9000
KEY = TicketKey(b"the key of all simulated suites..")
_PROPAGATION_S = 0.5
_CANARY = CanaryTimes(interval_s=10.0, deadline_s=5.0)
_STUCK_S = 60.0


class Node:
    """Tasks that live and die together, and what they serve."""

    def __init__(self, name: str, loop: SimulatedLoop) -> None:
        self.name = name
        self.context = contextvars.copy_context()
        self.context.run(NODE.set, name)
        self.methods: ServicerTable = MethodTable(Rpcs())
        self.serving = False
        """Whether its port is open."""
        self._loop = loop

    def spawn(self, work: Callable[[], Any]) -> asyncio.Task[Any]:
        return self.context.run(lambda: asyncio.ensure_future(work()))

    async def kill(self) -> None:
        """Stop it without a word: nothing that its tasks still do leaves it."""
        self.serving = False
        for _ in range(9):  # some wait for others that they have cancelled, or start new ones
            tasks = list(self._loop.tasks[self.name])
            if not tasks:
                return
            for task in tasks:
                task.cancel()
            await asyncio.sleep(0)


class WorkerNode(Node):
    """A worker with the engine of simulated suites."""

    def __init__(
        self,
        name: str,
        role: Role,
        loop: SimulatedLoop,
        machine: Machine,
        text: TextModel,
        **engine: Any,
    ) -> None:
        super().__init__(name, loop)
        self.role = role
        config = SimulatedConfig(
            role=role, vocab_size=VOCAB_SIZE, bootstrap_host=name, bootstrap_port=BOOTSTRAP_PORT,
            **engine,
        )  # fmt: skip
        self.engine = TellingEngine(config, machine, text)
        gate = TicketGate(KEY, loop.wall_s) if role.hands_off else None
        service = {Role.PREFILL: PREFILL, Role.DIFFUSION: DIFFUSION}.get(role, DECODE)
        plan = make_plan(self.engine, role, MODEL, service, gate)
        self.host = WorkerHost(plan)
        self._health = HealthServicer(plan.services)
        self.conditions = HealthConditions(lambda serving: self._health.set(serving=serving))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.methods)
        self.host.attach(self.methods, self.conditions)
        self.failed = asyncio.Event()
        self.draining = False

    async def run(self) -> None:
        self.serving = True
        info = await self.host.load(lambda _: self.failed.set())
        watch = EngineWatch(
            self.conditions, _STUCK_S, lambda _: self.failed.set(), self.host.silence
        )
        async with watch.watching(self.engine, info.dp_size, _CANARY):
            await self.failed.wait()

    async def drain(self, limit_s: float) -> None:
        self.draining = True
        self._health.begin_drain()
        await self.host.drain(_PROPAGATION_S, limit_s)

    @property
    def used(self) -> Mapping[str, int]:
        """What requests take there: all zero if there are none."""
        ranks = self.engine._ranks
        return {
            "open requests": self.host.requests.count,
            "engine requests": sum(rank.open_requests for rank in ranks),
            "KV blocks": sum(rank.load().used_blocks for rank in ranks),
        }


class AtOnce:
    """In place of threads, which would bring chance of their own."""

    async def run(self, work: Callable[[], Any], seconds: float, **_: Any) -> Any:
        await asyncio.sleep(seconds)
        return work()


class Addressed:
    """A `Discovery` whose workers the test names."""

    def __init__(self) -> None:
        self.addresses: list[str] = []
        self._changed = asyncio.Event()

    def set(self, addresses: list[str]) -> None:
        self.addresses = list(addresses)
        self._changed.set()

    async def watch(self) -> AsyncIterator[Addresses]:
        while True:
            self._changed.clear()
            yield frozenset(self.addresses)
            await self._changed.wait()


class ProcessorNode(Node):
    """A Processor, as `processor.app` makes it, without its ports."""

    def __init__(
        self,
        name: str,
        loop: SimulatedLoop,
        network: Network,
        text: TextModel,
        nodes: Callable[[str], Node | None],
        *,
        form: str,
        queue: QueueLimits,
        pacing_s: float,
    ) -> None:
        """Serve a model that writes in the format ``form``; ``nodes`` finds workers by name.

        The pacer doesn't measure how busy the process is, which no virtual clock can tell: it keeps
        to ``pacing_s``.
        """
        super().__init__(name, loop)
        self.draining = False
        self.leaving = False
        """Its clients were told to open no more calls."""
        self.found = Addressed()
        self.router = Router(
            lambda: make_policy(PolicyName.LEAST_LOADED, None),
            Handoff(HandoffMode.ALWAYS, 0),
            round_s=round_s(self.found),
        )
        self.fleet = Fleet(self.found, self.router, unread=UnreadOutput())
        self.fleet._open_channel = lambda address: SimulatedChannel(network, name, address, nodes)  # type: ignore[assignment]
        self.pacer = Pacer(pacing_s)
        self.pacer.interval_s = pacing_s
        self.front = Front(
            Models({MODEL: text}, self.router, formats={MODEL: form}),
            self.router,
            limits=RequestLimits(queue=queue),
        )
        parts = TurnParts(
            pacer=self.pacer,
            workers=self.fleet,
            ticket_key=KEY,
            unread=self.fleet.unread,
            redispatch=Redispatcher(self.router.plan, self.front.running, self.front.repeated),
        )
        prompts = Prompts(PoolLimits(threads=2))
        prompts.threads = AtOnce()  # type: ignore[assignment]
        media = ProcessorMedia(
            self.router,
            self.fleet,
            Intake(
                UrlFetcher(enabled=False, hosts=(), max_bytes=1 << 20, pool=prompts.threads),
                max_item_bytes=1 << 20,
                max_items=1,
            ),
            MediaBudget(1 << 20),
            tickets=None,
            shared_cache=False,
        )
        self.core = ProcessorCore(self.front, prompts, parts, media)
        processor_pb2_grpc.add_ProcessorServiceServicer_to_server(
            ProcessorServicer(self.core), self.methods
        )

    async def run(self) -> None:
        self.serving = True
        self.fleet.open()
        await asyncio.Event().wait()

    async def drain(self, limit_s: float) -> None:
        self.draining = True
        await self.core.work.drain(_PROPAGATION_S, limit_s, self._stop_accepting)

    async def _stop_accepting(self) -> None:
        self.leaving = True
        await asyncio.sleep(_PROPAGATION_S)  # until calls that were on their way have arrived

    @property
    def used(self) -> Mapping[str, int]:
        """What requests take there: all zero if there are none."""
        queues = self.front.queues.values()
        return {
            "open calls": self.front.work.count,
            "running": sum(queue.running for queue in queues),
            "queued": sum(queue.queued for queue in queues),
            "unread bytes": self.fleet.unread.used,
            "requests at workers": sum(link.view.in_flight for link in self.fleet._links.values()),
        }
