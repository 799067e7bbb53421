"""A worker process of any ability: listen, load, serve, drain."""

from __future__ import annotations

import asyncio
from typing import Generic

from millstream_server.runtime.errors import ServingError
from millstream_server.runtime.lifecycle.admin import AdminService
from millstream_server.runtime.lifecycle.main import DRAINED, FAILED, Signals, until_signal
from millstream_server.runtime.lifecycle.service import Service, ServicePlan, peers_policy
from millstream_server.runtime.rpc.auth import AuthPolicy
from millstream_server.runtime.rpc.serving import ServicerTable
from millstream_server.runtime.telemetry.log import get_log
from millstream_server.worker.canary import CanaryTimes, EngineWatch
from millstream_server.worker.control import servicer
from millstream_server.worker.control.core import ControlCore
from millstream_server.worker.host import InfoT, WorkerHost, WorkerPlan
from millstream_server.worker.host_settings import HostSettings
from millstream_server.worker.servicer import LONG_STREAMS, SERVICE

log = get_log(__name__)

_FAILURE_TOLD_S = 0.5
"""Longest wait until those that watch the start know that it has failed."""


async def run(settings: HostSettings, plan: WorkerPlan[InfoT]) -> int:
    """Run a worker; return the process's exit code.

    The port is open from the start; health is NOT_SERVING until the model is loaded and warmed up.

    Raises:
        SettingsError: settings contradict each other.
        OSError: a port can't be bound.
    """
    return await _Process(settings, plan).run()


class _Process(Generic[InfoT]):
    """A host, its server, and what ends them."""

    def __init__(self, settings: HostSettings, plan: WorkerPlan[InfoT]) -> None:
        self._settings = settings
        self._plan = plan
        self._service = Service(
            settings,
            f"millstream-{plan.role.value}",
            {"millstream.role": plan.role.value, "millstream.model": plan.model},
        )
        self._host = WorkerHost(
            plan, max_open_requests=settings.max_open_requests, tracing=self._service.tracing
        )
        self._control: ControlCore | None = None
        """None: there is no admin address."""
        self._server = self._service.prepare(
            ServicePlan(
                services=(*plan.services, SERVICE),
                max_receive_bytes=plan.max_receive_bytes,
                load=self._host.requests.meter,
                open_work=lambda: {"requests": self._host.requests.count},
                auth=AuthPolicy(peers=peers_policy(settings)),
                without_spans=LONG_STREAMS.union(plan.without_spans),
                collectors=(self._host.metrics,),
                admin_services=(
                    AdminService(servicer.SERVICE, self._add_control, servicer.MAX_RECEIVE_BYTES),
                ),
            )
        )
        self._host.attach(self._server.methods, self._server.conditions)

    async def run(self) -> int:
        """Serve until a signal comes or the engine fails."""
        grace_s = 0.0
        try:
            await self._service.listen()
            return await self._serve()
        except ServingError as error:
            log.error("start failed", reason=error.message, error=error)
            grace_s = _FAILURE_TOLD_S
            return FAILED
        finally:
            if self._control is not None:
                self._control.close()
            try:
                await self._plan.engine.close()
            finally:
                await self._service.close(grace_s)

    async def _serve(self) -> int:
        settings, plan = self._settings, self._plan
        signals = Signals()
        failed: asyncio.Future[ServingError] = asyncio.get_running_loop().create_future()

        def on_failure(error: ServingError) -> None:
            log.error("worker stops after a failure", reason=error.message)
            if not failed.done():
                failed.set_result(error)

        loaded = await signals.unless(self._host.load(on_failure))
        if loaded is None:
            log.info("stopped before the model was loaded")
            return DRAINED
        log.phase("serving", role=plan.role.value, model=plan.model, device=loaded.device or "none")
        watch = EngineWatch(
            self._server.conditions, settings.stuck_limit_s, on_failure, self._host.silence
        )
        times = CanaryTimes(
            interval_s=settings.canary_interval_s, deadline_s=settings.canary_timeout_s
        )
        async with watch.watching(plan.engine, loaded.dp_size, times):
            return await until_signal(self._server, signals, self._drain, failed)

    async def _drain(self) -> bool:
        """Let open requests and an operation that changes the engine end; return whether they did.

        `ControlCore` ends other operations when the drain begins.
        """
        settings = self._settings
        loop = asyncio.get_running_loop()
        end_s = loop.time() + settings.propagation_s + settings.drain_s
        clean = await self._host.drain(settings.propagation_s, settings.drain_s)
        if self._control is not None:
            clean = await self._control.until_done(end_s - loop.time()) and clean
        return clean

    def _add_control(self, server: ServicerTable) -> None:
        self._control = ControlCore(
            self._host, self._service.server.conditions, self._settings.propagation_s
        )
        servicer.add_service(self._control, server)
