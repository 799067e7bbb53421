"""A worker process from start to exit: listen, load, warm up, serve, drain."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable

from millstream.v1 import worker_pb2_grpc
from millstream_server.engines.base import EngineInfo, Role
from millstream_server.runtime.auth import AuthPolicy
from millstream_server.runtime.errors import EngineFailedError, ServingError
from millstream_server.runtime.log import phase
from millstream_server.runtime.server import DRAINED, FAILED, Server, Signals, until_signal
from millstream_server.runtime.service import Service, ServicePlan, peers_policy
from millstream_server.runtime.settings import SettingsError
from millstream_server.transfer.ticket import TicketGate, TicketKey
from millstream_server.worker.canary import Canary, CanaryTimes
from millstream_server.worker.core import WorkerCore
from millstream_server.worker.engine_choice import make_engine, model_name
from millstream_server.worker.engine_metrics import EngineMetrics
from millstream_server.worker.info import WorkerInfoServicer
from millstream_server.worker.limits import WorkerLimits
from millstream_server.worker.request_telemetry import WorkerTelemetry
from millstream_server.worker.settings import WorkerSettings
from millstream_server.worker_stream.start import LONG_STREAMS

logger = logging.getLogger(__name__)

# A start message with the longest prompt we know of (2 M tokens, 5 bytes each) fits; what is longer
# than the model's context is refused as that request's own error, not the stream's.
_MAX_RECEIVE_BYTES = 32 << 20

AddService = Callable[[WorkerCore, Server], None]


async def run(settings: WorkerSettings, role: Role, service: str, add_service: AddService) -> int:
    """Run a worker of ``role`` that serves ``service``; answers the process's exit code.

    The port is open from the start, NOT_SERVING until the model is loaded and warm.
    """
    return await _Worker(settings, role, service).run(add_service)


class _Worker:
    """The parts of a worker process, wired."""

    def __init__(self, settings: WorkerSettings, role: Role, service: str) -> None:
        self._settings = settings
        self._role = role
        model = model_name(settings)
        self._service = Service(
            settings,
            f"millstream-{role.value}",
            {"millstream.role": role.value, "millstream.model": model},
        )
        self._engine = make_engine(settings, role)
        self._core = WorkerCore(
            self._engine,
            role,
            _gate(settings, role),
            WorkerTelemetry(role, model, self._service.tracing),
            limits=WorkerLimits(
                max_open_requests=settings.max_open_requests,
                max_open_tokens=settings.max_open_tokens,
            ),
        )
        self._info = WorkerInfoServicer(self._engine, role, model, self._core.work)
        self._metrics = EngineMetrics(self._engine, role, model)
        self._server = self._service.prepare(
            ServicePlan(
                services=(service, "millstream.v1.WorkerService"),
                max_receive_bytes=_MAX_RECEIVE_BYTES,
                load=self._core.meter,
                open_work=lambda: {"requests": self._core.work.count},
                auth=AuthPolicy(peers=peers_policy(settings)),
                without_spans=LONG_STREAMS,
                collectors=(self._metrics,),
            )
        )
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self._info, self._server.grpc)

    async def run(self, add_service: AddService) -> int:
        """Serve until told to stop, or until the engine dies."""
        add_service(self._core, self._server)
        try:
            await self._service.listen()
            return await self._serve()
        except ServingError as error:
            logger.error("start failed: %s", error.message, exc_info=error)  # noqa: TRY400
            return FAILED
        finally:
            try:
                await self._engine.close()
            finally:
                await self._service.close()

    async def _serve(self) -> int:
        settings = self._settings
        signals = Signals()
        failed: asyncio.Future[ServingError] = asyncio.get_running_loop().create_future()

        def on_failure(error: ServingError) -> None:
            logger.error("this worker leaves: %s", error.message)
            if not failed.done():
                failed.set_result(error)

        info = await signals.unless(self._load(on_failure))
        if info is None:
            logger.info("told to stop before the model was loaded")
            return DRAINED
        self._core.ready(info)
        self._info.ready(info)
        self._metrics.ready(info)
        self._server.set_serving(serving=True)
        phase(logger, "serving")
        logger.info("role=%s model=%s", self._role.value, model_name(settings))
        async with self._watched(info, on_failure):
            return await until_signal(
                self._server,
                signals,
                lambda: self._core.drain(settings.propagation_s, settings.drain_s),
                failed,
            )

    async def _load(self, on_failure: Callable[[ServingError], None]) -> EngineInfo:
        phase(logger, "loading the model")
        info = await self._engine.start(on_failure)
        phase(logger, "warming up")
        await self._engine.warm_up()
        return info

    @contextlib.asynccontextmanager
    async def _watched(
        self, info: EngineInfo, on_failure: Callable[[ServingError], None]
    ) -> AsyncIterator[None]:
        """Turn NOT_SERVING while the engine is stuck; give it up when it doesn't recover.

        A canary that ends by an accident counts as the engine's death.
        """
        settings = self._settings
        if not settings.canary_interval_s:
            yield
            return
        loop = asyncio.get_running_loop()
        patience: asyncio.TimerHandle | None = None

        def unwatched(watching: asyncio.Task[None]) -> None:
            """End a worker whose canary ended by itself: a hang would go unnoticed."""
            if watching.cancelled():
                return
            logger.error("the canary broke", exc_info=watching.exception())
            on_failure(EngineFailedError("nobody watches it any more: its canary broke"))

        def give_up() -> None:
            on_failure(EngineFailedError(f"it was stuck for {settings.stuck_limit_s:g} s"))

        def on_change(healthy: bool) -> None:  # noqa: FBT001 - the canary's callback
            nonlocal patience
            self._server.set_serving(serving=healthy)
            phase(logger, "serving" if healthy else "stuck: the engine gives no answer")
            if patience is not None:
                patience.cancel()
                patience = None
            if not healthy and settings.stuck_limit_s:
                patience = loop.call_later(settings.stuck_limit_s, give_up)

        times = CanaryTimes(
            interval_s=settings.canary_interval_s, deadline_s=settings.canary_timeout_s
        )
        canary = Canary(self._engine, info.dp_size, on_change, times)
        watching = asyncio.ensure_future(canary.run())
        watching.add_done_callback(unwatched)
        try:
            yield
        finally:
            watching.cancel()
            if patience is not None:
                patience.cancel()


def _gate(settings: WorkerSettings, role: Role) -> TicketGate | None:
    if role is Role.AGGREGATED:
        return None
    if not settings.ticket_key:
        raise SettingsError(
            "MILLSTREAM_TICKET_KEY is required: the same key, 32 random bytes in hex, for the "
            "Processor and all prefill and decode workers (make one with `openssl rand -hex 32`)"
        )
    try:
        return TicketGate(TicketKey.from_hex(settings.ticket_key))
    except ValueError as error:
        raise SettingsError(f"MILLSTREAM_TICKET_KEY: {error}") from error
