"""The Processor's process, from start to exit."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Collection, Mapping
from pathlib import Path

from millstream_server.encode.transfer.ticket import EmbeddingTickets
from millstream_server.generation.ticket import TicketKey
from millstream_server.links.fleet import Fleet
from millstream_server.links.unread import UnreadOutput
from millstream_server.model_files.state import expect_usable
from millstream_server.processor.admission import QueueLimits
from millstream_server.processor.convert import held_bytes
from millstream_server.processor.core import ProcessorCore
from millstream_server.processor.diffusion.core import DiffusionCore
from millstream_server.processor.diffusion.text import TextForwarder
from millstream_server.processor.embedding.core import VectorsCore
from millstream_server.processor.front import Front
from millstream_server.processor.http.door import Door
from millstream_server.processor.http.pipeline import Pipeline
from millstream_server.processor.media.core import ProcessorMedia
from millstream_server.processor.media.intake import Intake
from millstream_server.processor.media.uploads import MediaBudget
from millstream_server.processor.media.urls import UrlFetcher
from millstream_server.processor.models import ModelNames, Models
from millstream_server.processor.output import Pacer
from millstream_server.processor.prompts import Prompts
from millstream_server.processor.redispatch import Redispatcher
from millstream_server.processor.requests import RequestLimits
from millstream_server.processor.servicer import ProcessorServicer, add_servicers
from millstream_server.processor.settings import ProcessorSettings
from millstream_server.processor.slot_streams import (
    DIFFUSION,
    EMBEDDING,
    DiffusionServicer,
    EmbeddingServicer,
)
from millstream_server.processor.telemetry import FrontTelemetry
from millstream_server.processor.text.model_files import UnusableModelError
from millstream_server.processor.text.tokenizer import TextModel
from millstream_server.processor.turn import TurnParts
from millstream_server.routing.discovery.sources import Discovery, make_discovery, round_s
from millstream_server.routing.kv_aware import make_policy
from millstream_server.routing.plan import Handoff, HandoffMode
from millstream_server.routing.policy import PolicyName
from millstream_server.routing.prefix.prefixes import Prefixes
from millstream_server.routing.router import Router
from millstream_server.runtime.lifecycle.conditions import (
    LOADING,
    NO_WORKERS,
    VERSIONS_DIFFER,
)
from millstream_server.runtime.lifecycle.main import DRAINED, Signals, until_signal
from millstream_server.runtime.lifecycle.server import Server
from millstream_server.runtime.lifecycle.service import Service, ServicePlan, peers_policy
from millstream_server.runtime.rpc.auth import AuthPolicy
from millstream_server.runtime.rpc.limits import RpcLimits
from millstream_server.runtime.security.api_keys import ApiKeys
from millstream_server.runtime.security.tls import ClientTls
from millstream_server.runtime.settings import SettingsError
from millstream_server.runtime.telemetry.log import get_log
from millstream_server.runtime.threads import DaemonThreads
from millstream_server.runtime.work.fair_queue import PoolLimits
from millstream_server.runtime.work.pool import WorkPool

log = get_log(__name__)

SERVICE = "millstream.v1.ProcessorService"
SERVICES = (SERVICE, DIFFUSION, EMBEDDING)
# Text threads need the GIL a few times per request, and wait up to this long for it each time while
# the event loop is busy. With Python's 5 ms a burst of 64 chats waited a second for first tokens.
_SWITCH_INTERVAL_S = 0.0005
_LEAST_TEXT_THREADS = 2
_MAX_MEDIA_ITEMS = 64
"""Images and videos of one conversation: more than a model's context takes."""


async def run(settings: ProcessorSettings) -> int:
    """Run a Processor; return the process's exit code.

    It is SERVING while every model has a worker of every role it needs. Its own port opens when the
    models' directories are read, the ports for probes and operators before that.
    """
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    signals = Signals()
    service = Service(settings, "millstream-processor")
    changed = asyncio.Event()
    changed.set()
    discovery = make_discovery(settings.workers)
    router = _router(settings, discovery)
    router.watch(changed.set)
    fleet = _fleet(settings, service, router, discovery)
    pacer = Pacer(settings.max_pace_s)
    texts: dict[str, TextModel | None] = dict.fromkeys(settings.model_directories())
    broken: set[str] = set()
    core = _core(settings, service, router, fleet, pacer, texts=texts, broken=broken)
    server = service.prepare(_plan(settings, core))
    loading = server.conditions.own(LOADING, holds=True)
    add_services(server, core, fleet, http=settings.http, page=settings.page)
    async with contextlib.AsyncExitStack() as parts:  # the last pushed is the first closed
        parts.callback(core.prompts.close)
        parts.push_async_callback(service.close)
        parts.push_async_callback(fleet.close)
        parts.push_async_callback(pacer.close)
        await service.listen_aside()
        health = asyncio.ensure_future(follow_readiness(core, server, changed))
        parts.callback(health.cancel)
        log.phase("reading the models")
        loaded = await signals.unless(load_models(settings.model_directories()))
        if loaded is None:
            log.info("stopped before the models were read")
            return DRAINED
        texts.update(loaded)
        broken |= texts.keys() - loaded.keys()
        await service.listen()
        loading.clear()
        log.info("models", names=",".join(core.models.names))
        log.phase("waiting for workers")
        fleet.open()
        pacer.open()
        failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        return await until_signal(
            server,
            signals,
            lambda: core.work.drain(
                settings.propagation_s, settings.drain_s, server.stop_accepting
            ),
            failed,
        )


def add_services(
    server: Server, core: ProcessorCore, workers: Fleet, *, http: bool = True, page: bool = True
) -> None:
    """Add all services of a Processor to ``server``; with ``http`` the HTTP API and ``page``."""
    front = core.front
    vectors, diffusion = VectorsCore(front, core.prompts, workers), DiffusionCore(front, workers)
    if http:
        pipeline = Pipeline(
            calls=front,
            threads=core.prompts.threads,
            chats=core,
            texts=core.texts,
            vectors=vectors,
            images=diffusion,
        )
        Door(pipeline, page=page).register(server)
    add_servicers(
        server.methods,
        ProcessorServicer(core),
        DiffusionServicer(
            front,
            diffusion,
            TextForwarder(front, workers, workers.unread),
            core.media.budget,
        ),
        EmbeddingServicer(front, vectors),
    )


def _router(settings: ProcessorSettings, discovery: Discovery) -> Router:
    prefixes = None
    if settings.policy is PolicyName.KV_AWARE or settings.handoff is HandoffMode.AUTO:
        prefixes = Prefixes(settings.prefix_index_blocks)
    return Router(
        lambda: make_policy(settings.policy, prefixes),
        Handoff(settings.handoff, settings.handoff_min_tokens),
        prefixes,
        round_s(discovery),
    )


def _fleet(
    settings: ProcessorSettings, service: Service, router: Router, discovery: Discovery
) -> Fleet:
    return Fleet(
        discovery,
        router,
        tls=_worker_tls(settings),
        tracing=service.tracing,
        unread=UnreadOutput(settings.max_open_bytes),
    )


def _core(
    settings: ProcessorSettings,
    service: Service,
    router: Router,
    fleet: Fleet,
    pacer: Pacer,
    *,
    texts: Mapping[str, TextModel | None],
    broken: Collection[str],
) -> ProcessorCore:
    key = _ticket_key(settings.ticket_key)
    front = Front(
        Models(
            texts,
            router,
            ModelNames(settings.aliases(), settings.defaults()),
            settings.model_formats(),
            broken,
        ),
        router,
        limits=_limits(settings),
        telemetry=FrontTelemetry(service.tracing),
        max_held_bytes=settings.max_open_bytes,
        redispatch=settings.redispatch,
        is_full=lambda: pacer.is_full,
    )
    redispatch = Redispatcher(router.plan, front.running, front.repeated)
    prompts = Prompts(_text_limits(settings))
    return ProcessorCore(
        front,
        prompts,
        TurnParts(
            pacer=pacer,
            workers=fleet,
            ticket_key=key,
            unread=fleet.unread,
            redispatch=redispatch if settings.redispatch else None,
        ),
        _media(settings, router, fleet, key, prompts.threads),
    )


def _text_limits(settings: ProcessorSettings) -> PoolLimits:
    if settings.text_threads < _LEAST_TEXT_THREADS:
        raise SettingsError(
            f"--text-threads is {settings.text_threads}: it must be {_LEAST_TEXT_THREADS} or more, "
            "since long texts must leave one thread to chats"
        )
    return PoolLimits(threads=settings.text_threads)


def _media(
    settings: ProcessorSettings,
    router: Router,
    fleet: Fleet,
    key: TicketKey | None,
    pool: WorkPool,
) -> ProcessorMedia:
    most, hosts = settings.max_media_item_bytes, settings.fetch_url_hosts
    urls = UrlFetcher(enabled=settings.fetch_urls, hosts=hosts, max_bytes=most, pool=pool)
    return ProcessorMedia(
        router,
        fleet,
        Intake(urls, max_item_bytes=most, max_items=_MAX_MEDIA_ITEMS),
        MediaBudget(settings.max_open_bytes),
        tickets=EmbeddingTickets(key) if key else None,
        shared_cache=settings.share_media_cache,
    )


async def follow_readiness(core: ProcessorCore, server: Server, changed: asyncio.Event) -> None:
    """Set health to SERVING while every model has a worker of every role it needs."""
    no_workers = server.conditions.own(NO_WORKERS, holds=True)
    differ = server.conditions.own(VERSIONS_DIFFER)
    while True:
        await changed.wait()
        changed.clear()
        ready = core.models.ready()
        apart = [name for name in core.models.names if core.front.router.of(name).versions_differ]
        if bool(apart) is not differ.holds:
            differ.set(holds=bool(apart))
            if apart:
                log.warning(
                    "prefill and decode workers have different weight versions; update one side",
                    models=",".join(apart),
                )
        if no_workers.holds is ready:
            no_workers.set(holds=not ready)
            log.phase("serving" if ready else "waiting for workers")


def _plan(settings: ProcessorSettings, core: ProcessorCore) -> ServicePlan:
    keys = None
    if settings.api_keys_file or settings.api_keys:
        keys = ApiKeys(file=settings.api_keys_file, inline=settings.api_keys)
    return ServicePlan(
        services=SERVICES,
        max_receive_bytes=settings.max_receive_bytes,
        load=core.front.meter,
        open_work=lambda: {"streams": core.work.count},
        clients=settings.transport(),
        pool=core.prompts.threads,
        without_spans=(f"{DIFFUSION}/GenerateText",),  # its requests have spans
        auth=AuthPolicy(keys=keys, peers=peers_policy(settings)),
        limits=RpcLimits(
            max_open_streams=settings.max_open_streams,
            max_open_bytes=settings.max_open_bytes,
            held_bytes=held_bytes,
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
    if settings.worker_tls_dir is None:
        return None
    return ClientTls(settings.worker_tls_dir, server_name=settings.worker_tls_name)


async def load_models(directories: Mapping[str, Path | None]) -> dict[str, TextModel | None]:
    """Read the models' directories in a thread: a file system may hang, a template be large.

    Of several models those whose directories can't be used are left out, and logged: one model must
    not take the others away.

    Raises:
        SettingsError: none can be used.
    """
    threads = DaemonThreads(1, "models")
    try:
        return await asyncio.wrap_future(threads.submit(_read_models, directories))
    finally:
        threads.close()


def _read_models(directories: Mapping[str, Path | None]) -> dict[str, TextModel | None]:
    paths = {name: directory for name, directory in directories.items() if directory}
    read: dict[str, TextModel | None] = dict.fromkeys(directories.keys() - paths.keys())
    try:
        return read | _read_all(paths)
    except SettingsError:
        if len(directories) == 1:
            raise
    for name, path in paths.items():
        try:
            read |= _read_all({name: path})
        except SettingsError as error:
            log.error("a model is unavailable: its files can't be read", model=name, reason=error)
    if not read:
        raise SettingsError("--models: none can be read; the lines above say why")
    return read


def _read_all(paths: Mapping[str, Path]) -> dict[str, TextModel | None]:
    for path in paths.values():
        expect_usable(path)
    try:
        return dict(zip(paths, TextModel.load_all(list(paths.values())), strict=True))
    except UnusableModelError as error:
        raise SettingsError(f"--models: {error}") from error


def _ticket_key(text: str) -> TicketKey | None:
    try:
        return TicketKey.from_hex(text) if text else None
    except ValueError as error:
        raise SettingsError(f"MILLSTREAM_TICKET_KEY: {error}") from error
