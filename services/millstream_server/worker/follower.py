"""A worker process that runs a part of a model, while another process serves its requests.

It serves health under the worker's usual names, so that the same probes fit, and nothing else.
"""

from __future__ import annotations

import asyncio
from typing import Any

from millstream_server.control.engine import Follower, LoadStage, Role
from millstream_server.runtime.errors import ServingError
from millstream_server.runtime.lifecycle.conditions import LOADING
from millstream_server.runtime.lifecycle.main import DRAINED, FAILED, PORT_FAILED, Signals
from millstream_server.runtime.lifecycle.service import Service, ServicePlan, peers_policy
from millstream_server.runtime.rpc.auth import AuthPolicy
from millstream_server.runtime.telemetry.log import get_log
from millstream_server.worker.host_settings import ModelSettings
from millstream_server.worker.loading import ModelLoading

log = get_log(__name__)
_STOP_GRACE_S = 0.2
_LEADER_CLOSES_S = 5.0
"""Longest time that a drained leader takes to stop its engine."""


async def run(settings: ModelSettings, follower: Follower, role: Role, service: str) -> int:
    """Run the process until its engine ends or a signal comes; return its exit code.

    ``service`` is the full proto name whose health it has.

    After a signal the engine goes on, since the leader may have to finish requests: until the
    leader ends it, at most as long as the leader's own drain may take.

    Raises:
        SettingsError: settings contradict each other.
        OSError: a port can't be bound.
    """
    names = {"millstream.role": role.value, "millstream.model": settings.served_name}
    process = Service(settings, f"millstream-{role.value}", names)
    loading = process.prepare(_plan(settings, service)).conditions.own(LOADING, holds=True)
    ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    try:
        await process.listen()
        signals = Signals()
        if not await signals.unless(_load(follower, ended)):
            log.info("stopped before the model was loaded")
            return DRAINED
        loading.clear()
        log.phase("serving", role=role.value, model=settings.served_name)
        wait_s = settings.propagation_s + settings.drain_s + _LEADER_CLOSES_S
        return await _until_end(process, signals, ended, wait_s)
    except ServingError as error:
        log.error("start failed", reason=error.message, error=error)
        return FAILED
    finally:
        try:
            await follower.close()
        finally:
            await process.close()


def _plan(settings: ModelSettings, service: str) -> ServicePlan:
    return ServicePlan(
        services=(service,),
        health_only=True,
        max_receive_bytes=1 << 20,
        load=None,
        open_work=dict,
        auth=AuthPolicy(peers=peers_policy(settings)),
    )


async def _load(follower: Follower, ended: asyncio.Future[str]) -> bool:
    """Load the part; ``ended`` gets the reason if the engine ends later."""
    log.phase("loading the model")
    loading = ModelLoading(follower)
    await follower.start(lambda why: None if ended.done() else ended.set_result(why))
    loading.reach(LoadStage.READY)
    return True


async def _until_end(
    process: Service, signals: Signals, ended: asyncio.Future[str], wait_s: float
) -> int:
    server = process.server
    events = (signals.first, signals.second, server.died)
    waits: list[asyncio.Future[Any]] = [asyncio.ensure_future(each.wait()) for each in events]
    first, second, died = waits
    try:
        await asyncio.wait({first, ended, died}, return_when=asyncio.FIRST_COMPLETED)
        server.begin_drain()
        if first.done():
            log.phase("draining")
            await asyncio.wait({second, ended}, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
        elif ended.done():
            log.error("the engine ended", reason=ended.result())
        await server.stop(_STOP_GRACE_S)
        log.phase("stopped")
        if died.done():
            return PORT_FAILED
        return DRAINED if first.done() else FAILED
    finally:
        for wait in waits:
            wait.cancel()
