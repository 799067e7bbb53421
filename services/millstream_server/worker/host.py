"""The host of a worker's engine: what every worker has, of any ability.

An ability provides a `WorkerPlan`: its engine and its servicer. The host provides `OpenRequests`
(limits, counts, spans), the watched info, the drain, WorkerService and load reports. `worker.app`
runs it as a process, with a canary. The host uses engines through `control.engine` only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Protocol, TypeVar

from prometheus_client.core import Metric

from millstream.v1 import worker_pb2_grpc
from millstream_server.control.engine import (
    Engine,
    EngineInfo,
    EngineLoad,
    LoadStage,
    Probeable,
    Role,
    WorkerDescription,
)
from millstream_server.protobuf.common import info_to_proto
from millstream_server.runtime.drain import OpenWork
from millstream_server.runtime.errors import ServingError, UnavailableError
from millstream_server.runtime.lifecycle.conditions import (
    LOADING,
    HealthCondition,
    HealthConditions,
)
from millstream_server.runtime.rpc.serving import ServicerTable
from millstream_server.runtime.telemetry.log import get_log
from millstream_server.runtime.telemetry.tracing import Tracing
from millstream_server.worker.canary import ExpectedSilence
from millstream_server.worker.control.plan import ControlPlan
from millstream_server.worker.control.weights_record import restored
from millstream_server.worker.engine_metrics import EngineMetrics, MetricsSource
from millstream_server.worker.kv_events.log import KvEventLog
from millstream_server.worker.load_report import LoadState, RankSilence
from millstream_server.worker.loading import ModelLoading, Watched
from millstream_server.worker.open_requests import (
    DEFAULT_TIMES,
    PROMPT_TOKENS,
    Counted,
    Described,
    OpenLimits,
    OpenRequests,
)
from millstream_server.worker.servicer import Describe, WorkerServicer

log = get_log(__name__)

InfoT = TypeVar("InfoT", bound=EngineInfo)
InfoT_co = TypeVar("InfoT_co", bound=EngineInfo, covariant=True)

_STREAMS_CLOSE_S = 47.0
"""In a drain: how long the peers of an idle worker may take to close their streams."""


class HostedEngine(Engine, Probeable, Protocol[InfoT_co]):
    """An engine as a host uses it: start, stop, load, health."""

    async def start(self, on_failure: Callable[[ServingError], None]) -> InfoT_co:
        """See `Engine.start`."""
        ...


class WrappedEngine:
    """An engine with something around it: satisfies `HostedEngine`, with a subclass's `start`.

    Passes everything on; a subclass says what it does itself.
    """

    def __init__(self, engine: HostedEngine[EngineInfo]) -> None:
        self._wrapped = engine

    async def warm_up(self) -> None:
        await self._wrapped.warm_up()

    async def load(self) -> EngineLoad:
        return await self._wrapped.load()

    def progress(self, dp_rank: int) -> int:
        return self._wrapped.progress(dp_rank)

    async def probe(self, dp_rank: int) -> None:
        await self._wrapped.probe(dp_rank)

    def metrics(self) -> Iterable[Metric]:
        return self._wrapped.metrics() if isinstance(self._wrapped, MetricsSource) else ()


def _no_token_limit(_: EngineInfo) -> int:
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPlan(Generic[InfoT]):
    """A worker of one ability."""

    engine: HostedEngine[InfoT]
    role: Role
    model: str
    """The model's name in requests."""
    operation: str
    """The operation, as in `gen_ai.operation.name`; spans are named after it."""
    services: tuple[str, ...]
    """Full proto names of the ability's services, without WorkerService."""
    add: Callable[[WorkerHost[InfoT], ServicerTable], None]
    describe: Describe = info_to_proto
    """Makes the worker's info message; an ability with further fields replaces it."""
    max_open_tokens: Callable[[InfoT], int] = _no_token_limit
    """Returns the most input tokens of open requests; 0: no limit."""
    counted: Counted = PROMPT_TOKENS
    """What these tokens are, for abilities that count something else."""
    kv: KvEventLog | None = None
    """What the engine tells of its prefix caches; None: it has no KV events."""
    max_receive_bytes: int = 4 << 20
    without_spans: Collection[str] = ()
    """Methods whose streams carry many requests: each request has a span, the stream has none."""
    control: ControlPlan = field(default_factory=ControlPlan)


class WorkerHost(Generic[InfoT]):
    """One engine and its surroundings.

    Order of calls: `attach`, `load`, any others, `drain`. All come from one event loop.
    """

    def __init__(
        self,
        plan: WorkerPlan[InfoT],
        *,
        max_open_requests: int = 0,
        tracing: Tracing | None = None,
    ) -> None:
        """Start nothing yet. ``max_open_requests`` 0: four times what the engine runs at once."""
        self.plan = plan
        self.tracing = tracing
        """Makes spans; None: there are none."""
        self.work = OpenWork()
        """Counts open requests; knows whether the worker drains."""
        self.silence = ExpectedSilence()
        """Tells the canary when the engine may make no progress."""
        self.streams = OpenWork()
        """Counts streams that carry requests; a drain waits until the notified ones have ended."""
        self.info: InfoT | None = None
        """The engine's info; None until it is loaded and warmed up."""
        self.description: Watched[WorkerDescription | None] = Watched(None)
        """What the worker is; None until the engine is loaded and warmed up."""
        self._loads: HealthCondition | None = None
        self._max_open_requests = max_open_requests
        self.requests = OpenRequests(
            self.work,
            Described(plan.operation, plan.role, plan.model),
            tracing,
            self._utilization,
            plan.counted,
        )
        self.metrics = EngineMetrics(plan.engine, plan.role, plan.model)
        self.progress = RankSilence(plan.engine)
        self.loading = ModelLoading(plan.engine)

    def attach(self, server: ServicerTable, conditions: HealthConditions) -> None:
        """Add the servicers, and add the condition `LOADING`."""
        self._loads = conditions.own(LOADING, holds=True)
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(WorkerServicer(self), server)
        self.plan.add(self, server)

    async def load(self, on_failure: Callable[[ServingError], None]) -> InfoT:
        """Load the model, warm up, then accept requests.

        Raises:
            EngineFailedError: the engine couldn't be started.
        """
        try:
            log.phase("loading the model")
            async with self.loading.following():
                info = await self.plan.engine.start(on_failure)
            log.phase("warming up")
            self.loading.reach(LoadStage.WARMING_UP)
            await self.plan.engine.warm_up()
            info = await restored(info, self.plan.control)
        except BaseException:  # also when a signal cancels it
            self.loading.fail()
            raise
        self.ready(info)
        return info

    def ready(self, info: InfoT) -> None:
        """Accept requests from now on: the engine is loaded and warmed up."""
        self.set_info(info)
        self.metrics.ready(info)
        if self._loads is not None:
            self._loads.clear()
        self.loading.reach(LoadStage.READY)

    def set_info(self, info: InfoT) -> None:
        """Replace the engine's info; watchers of the worker's info get the new one."""
        self.requests.limits = OpenLimits(
            max_requests=self._max_open_requests or DEFAULT_TIMES * info.max_running_requests,
            max_tokens=self.plan.max_open_tokens(info),
        )
        self.info = info
        known = self.description.value
        self.description.set(
            replace(known, engine=info)
            if known
            else WorkerDescription(role=self.plan.role, model=self.plan.model, engine=info)
        )

    def change_info(self, **changes: Any) -> None:
        """Replace fields of the engine's info: an operator has changed the engine."""
        self.set_info(replace(self.loaded(), **changes))

    def loaded(self) -> InfoT:
        """Return the engine's info.

        Raises:
            UnavailableError: the model is being loaded.
        """
        if self.info is None:
            raise UnavailableError("this worker is still loading its model", retry_delay_s=1.0)
        return self.info

    async def load_state(self) -> LoadState:
        engine = await self.plan.engine.load()
        return LoadState(engine=engine, tokens=replace(self.requests.ended))

    async def drain(self, propagation_s: float, limit_s: float) -> bool:
        """Let open work finish; return whether all of it ended in time.

        Notified peers close their streams once they have no open request on them; one that knows no
        other worker goes on for up to 45 s. Requests that arrive before that are accepted.
        """
        loop = asyncio.get_running_loop()
        end_s = loop.time() + propagation_s + limit_s
        await self.work.drain(propagation_s, limit_s)
        await self.streams.until_idle(min(_STREAMS_CLOSE_S, end_s - loop.time()))
        return await self.work.until_idle(end_s - loop.time())

    def _utilization(self) -> float:
        """Return open requests divided by those that the engine runs at once."""
        return self.requests.count / self.info.max_running_requests if self.info else 0.0
