"""The door's process, from start to exit."""

from __future__ import annotations

import asyncio
import contextlib

from millstream_server.door.entries import RemoteImages, RemoteVectors
from millstream_server.door.processors import Processors
from millstream_server.door.settings import DoorSettings
from millstream_server.door.texts import RemoteTexts
from millstream_server.door.turns import DoorParts, RemoteChats
from millstream_server.links.unread import UnreadOutput
from millstream_server.processor.http.door import Door
from millstream_server.processor.http.pipeline import Pipeline
from millstream_server.processor.media.uploads import MediaBudget
from millstream_server.processor.open_calls import OpenCalls
from millstream_server.processor.output import Pacer
from millstream_server.processor.text.fair_queue import TextLimits
from millstream_server.processor.text.threads import TextThreads
from millstream_server.routing.discovery.sources import Discovery, make_discovery
from millstream_server.runtime.lifecycle.conditions import NO_PROCESSORS, HealthCondition
from millstream_server.runtime.lifecycle.main import Signals, until_signal
from millstream_server.runtime.lifecycle.service import Service, ServicePlan, peers_policy
from millstream_server.runtime.rpc.auth import AuthPolicy
from millstream_server.runtime.rpc.limits import RpcLimits
from millstream_server.runtime.security.tls import ClientTls
from millstream_server.runtime.settings import SettingsError
from millstream_server.runtime.telemetry.log import get_log

log = get_log(__name__)

_MOST_PACE_S = 0.05
"""Longest time that output is gathered when the process is full, as at a Processor."""


async def run(settings: DoorSettings) -> int:
    """Run a door; return the process's exit code. It is SERVING while one of its Processors is."""
    signals = Signals()
    service = Service(settings, "millstream-door")
    discovery = _discovery(settings)
    calls = OpenCalls(settings.max_open_bytes)
    server = service.prepare(_plan(settings, calls))
    lacking = server.conditions.own(NO_PROCESSORS, holds=True)
    processors = Processors(
        discovery,
        lambda: _follow(processors, lacking),
        tls=_processor_tls(settings),
        tracing=service.tracing,
    )
    pacer, threads = Pacer(_MOST_PACE_S), TextThreads(TextLimits())
    pipeline = make_pipeline(
        processors, calls, pacer, threads, max_open_bytes=settings.max_open_bytes
    )
    Door(pipeline, page=settings.page).register(server)
    async with contextlib.AsyncExitStack() as parts:  # the last pushed is the first closed
        parts.push_async_callback(service.close)
        parts.callback(threads.close)
        parts.push_async_callback(processors.close)
        parts.push_async_callback(pacer.close)
        await service.listen()
        log.phase("waiting for processors")
        processors.open()
        pacer.open()
        failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        return await until_signal(
            server,
            signals,
            lambda: calls.work.drain(
                settings.propagation_s, settings.drain_s, server.stop_accepting
            ),
            failed,
        )


def make_pipeline(
    processors: Processors,
    calls: OpenCalls,
    pacer: Pacer,
    threads: TextThreads,
    *,
    max_open_bytes: int,
) -> Pipeline:
    """Make what the endpoints use of Processors; each kind of bytes is bounded by the number."""
    texts = RemoteTexts(processors)
    parts = DoorParts(pacer=pacer, unread=UnreadOutput(max_open_bytes))
    return Pipeline(
        calls=calls,
        threads=threads,
        chats=RemoteChats(processors, calls, parts, MediaBudget(max_open_bytes)),
        texts=texts,
        vectors=RemoteVectors(processors),
        images=RemoteImages(processors, texts),
    )


def _follow(processors: Processors, lacking: HealthCondition) -> None:
    """Set health to SERVING while a Processor serves."""
    if lacking.holds is processors.serving:
        lacking.set(holds=not processors.serving)
        log.phase("serving" if processors.serving else "waiting for processors")


def _discovery(settings: DoorSettings) -> Discovery:
    try:
        return make_discovery(settings.processors)
    except SettingsError as error:  # its sentences are of Processors' own setting
        raise SettingsError(str(error).replace("--workers", "--processors")) from error


def _plan(settings: DoorSettings, calls: OpenCalls) -> ServicePlan:
    return ServicePlan(
        services=(),
        max_receive_bytes=settings.max_receive_bytes,
        open_work=lambda: {"streams": calls.work.count},
        clients=settings.transport(),
        auth=AuthPolicy(peers=peers_policy(settings), forwards=True),
        limits=RpcLimits(
            max_open_streams=settings.max_open_streams, max_open_bytes=settings.max_open_bytes
        ),
    )


def _processor_tls(settings: DoorSettings) -> ClientTls | None:
    if settings.processor_tls_dir is None:
        return None
    return ClientTls(settings.processor_tls_dir, server_name=settings.processor_tls_name)
