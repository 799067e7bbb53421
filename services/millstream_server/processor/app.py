"""The Processor process from start to exit."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from pathlib import Path

from millstream.v1 import processor_pb2_grpc
from millstream_server.processor.core import ProcessorCore
from millstream_server.processor.limits import RequestLimits
from millstream_server.processor.pacing import Pacer
from millstream_server.processor.servicer import ProcessorServicer
from millstream_server.processor.settings import ProcessorSettings
from millstream_server.processor.text.model_files import UnusableModelError
from millstream_server.processor.text.tokenizer import TextModel
from millstream_server.processor.turn_telemetry import Turns
from millstream_server.routing.policy import make_policy
from millstream_server.routing.pool import WorkerPool
from millstream_server.runtime.admission import QueueLimits
from millstream_server.runtime.api_keys import ApiKeys
from millstream_server.runtime.auth import AuthPolicy
from millstream_server.runtime.log import phase
from millstream_server.runtime.rpc_limits import RpcLimits
from millstream_server.runtime.server import Server, Signals, until_signal
from millstream_server.runtime.service import Service, ServicePlan, peers_policy
from millstream_server.runtime.settings import SettingsError
from millstream_server.runtime.tls import ClientTls
from millstream_server.transfer.ticket import TicketKey

logger = logging.getLogger(__name__)

SERVICE = "millstream.v1.ProcessorService"
# The text threads take the GIL from a busy event loop a few times per request, and wait this long
# each time. Python's 5 ms made a burst of 64 chats wait a second for its first tokens.
_SWITCH_INTERVAL_S = 0.0005


async def run(settings: ProcessorSettings) -> int:
    """Run a Processor; answers the process's exit code.

    It is SERVING while every model has a worker of every role it needs.
    """
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    signals = Signals()
    service = Service(settings, "millstream-processor")
    changed = asyncio.Event()
    changed.set()
    pool = WorkerPool(
        settings.workers,
        lambda: make_policy(settings.policy),
        changed.set,
        tls=_worker_tls(settings),
        tracing=service.tracing,
    )
    pacer = Pacer(settings.max_pace_s)
    core = ProcessorCore(
        _load_models(settings.model_directories()),
        pool,
        pacer,
        _ticket_key(settings.ticket_key),
        settings.text_threads,
        limits=_limits(settings),
    )
    server = service.prepare(_plan(settings, core))
    processor_pb2_grpc.add_ProcessorServiceServicer_to_server(
        ProcessorServicer(core, Turns(service.tracing)), server.grpc
    )
    async with contextlib.AsyncExitStack() as parts:  # the last pushed is the first closed
        parts.push_async_callback(service.close)
        parts.callback(core.close)
        parts.push_async_callback(pool.close)
        parts.push_async_callback(pacer.close)
        await service.listen()
        logger.info("models=%s", ",".join(sorted(settings.model_directories())))
        phase(logger, "waiting for workers")
        pool.open()
        pacer.open()
        health = asyncio.ensure_future(follow_readiness(core, server, changed))
        parts.callback(health.cancel)
        failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        return await until_signal(
            server,
            signals,
            lambda: core.work.drain(settings.propagation_s, settings.drain_s),
            failed,
        )


async def follow_readiness(core: ProcessorCore, server: Server, changed: asyncio.Event) -> None:
    """Keep health true to whether every model has every worker it needs."""
    was = False  # as servers start
    while True:
        await changed.wait()
        changed.clear()
        ready = core.ready()
        if ready is not was:
            server.set_serving(serving=ready)
            phase(logger, "serving" if ready else "waiting for workers")
            was = ready


def _plan(settings: ProcessorSettings, core: ProcessorCore) -> ServicePlan:
    keys = None
    if settings.api_keys_file or settings.api_keys:
        keys = ApiKeys(file=settings.api_keys_file, inline=settings.api_keys)
    return ServicePlan(
        services=(SERVICE,),
        max_receive_bytes=settings.max_receive_bytes,
        load=core.meter,
        open_work=lambda: {"streams": core.work.count},
        ages=True,
        auth=AuthPolicy(keys=keys, peers=peers_policy(settings)),
        limits=RpcLimits(
            max_open_streams=settings.max_open_streams, max_open_bytes=settings.max_open_bytes
        ),
    )


def _limits(settings: ProcessorSettings) -> RequestLimits:
    return RequestLimits(
        max_request_tokens=settings.max_request_tokens,
        queue=QueueLimits(
            max_running=settings.max_admitted_requests,
            max_queued=settings.max_queued_requests,
            max_queued_tokens=settings.max_queued_tokens,
        ),
    )


def _worker_tls(settings: ProcessorSettings) -> ClientTls | None:
    if settings.worker_tls_ca_file is None:
        if settings.worker_tls_cert_file or settings.worker_tls_key_file:
            raise SettingsError("--worker-tls-ca-file is needed to check the workers' certificates")
        return None
    return ClientTls(
        settings.worker_tls_ca_file,
        settings.worker_tls_cert_file,
        settings.worker_tls_key_file,
        server_name=settings.worker_tls_name,
    )


def _load_models(directories: dict[str, Path]) -> dict[str, TextModel]:
    try:
        return {name: TextModel.load(directory) for name, directory in directories.items()}
    except UnusableModelError as error:
        raise SettingsError(f"--models: {error}") from error


def _ticket_key(text: str) -> TicketKey | None:
    try:
        return TicketKey.from_hex(text) if text else None
    except ValueError as error:
        raise SettingsError(f"MILLSTREAM_TICKET_KEY: {error}") from error
