"""A worker process that generates text: its engine, its embeddings, its plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from millstream_server.control.engine import Role
from millstream_server.control.operations import NO_CONTROLS, Controlled
from millstream_server.encode.fetching.fetch import EmbeddingFetcher, fetch_tls
from millstream_server.encode.transfer.ticket import EmbeddingTickets
from millstream_server.engines.adapter import DllmSettings
from millstream_server.generation.generator import GeneratorEngine, GeneratorInfo
from millstream_server.generation.ticket import TicketGate, TicketKey
from millstream_server.generation.worker.core import GenerationWorker
from millstream_server.generation.worker.fetching import Fetcher
from millstream_server.generation.worker.servicer import GenerationService
from millstream_server.generation.worker.settings import WorkerSettings
from millstream_server.kv_cache.events import KvEventSource
from millstream_server.runtime.rpc.serving import ServicerTable
from millstream_server.runtime.settings import SettingsError
from millstream_server.worker import app, follower
from millstream_server.worker.control.plan import ControlPlan
from millstream_server.worker.host import WorkerHost, WorkerPlan
from millstream_server.worker.kv_events.log import KvEventLog
from millstream_server.worker_info import description_to_proto

# Enough for a start message with the longest prompt we know of (2 M tokens, 5 bytes each): a prompt
# above the model's context then fails as one request, not with the whole stream.
_MAX_RECEIVE_BYTES = 32 << 20
_OPERATIONS = {
    Role.PREFILL: "prefill",
    Role.DECODE: "decode",
    Role.AGGREGATED: "decode",
    Role.DIFFUSION: "generate_text",
}


Plan = WorkerPlan[GeneratorInfo]
Extend = Callable[[Plan, EmbeddingFetcher | None], Plan]
"""Adds to a worker's plan; with what fetches its embeddings, None: it has none."""


async def run(
    settings: WorkerSettings,
    role: Role,
    service: GenerationService,
    extend: Extend = lambda plan, _: plan,
    *,
    dllm: DllmSettings | None = None,
) -> int:
    """Run a worker of ``role`` that serves ``service``; return the process's exit code.

    ``extend`` may add services. ``dllm`` is for a DIFFUSION worker.

    Raises:
        SettingsError: settings contradict each other.
    """
    if (part := settings.ENGINES.follower(settings, role, dllm=dllm)) is not None:
        return await follower.run(settings, part, role, service.name)
    key = _ticket_key(settings.ticket_key, role)
    # A decode worker gets the KV cache, so it needs no embeddings.
    fetcher: EmbeddingFetcher | None = None
    if key and role is not Role.DECODE:
        fetcher = EmbeddingFetcher(
            EmbeddingTickets(key),
            transfer=settings.embedding.embedding_transfer,
            tls=fetch_tls(settings.embedding_fetch),
        )
    plan = make_plan(
        settings.ENGINES.make(settings, role, dllm=dllm),
        role,
        settings.served_name,
        service,
        TicketGate(key) if key and role.hands_off else None,
        max_open_tokens=settings.max_open_tokens,
        control=settings.control.plan(settings.model_path),
        fetcher=fetcher,
    )
    try:
        return await app.run(settings, extend(plan, fetcher))
    finally:
        if fetcher is not None:
            await fetcher.close()


def make_plan(
    engine: GeneratorEngine,
    role: Role,
    model: str,
    service: GenerationService,
    gate: TicketGate | None,
    *,
    max_open_tokens: int = 0,
    control: ControlPlan | None = None,
    fetcher: Fetcher | None = None,
) -> WorkerPlan[GeneratorInfo]:
    """Make a worker's plan; ``max_open_tokens`` 0: four times the KV cache's size.

    Without a ``fetcher`` of embeddings the worker refuses images and videos, unless it is a decode
    worker, which needs none.
    """

    def add(host: WorkerHost[GeneratorInfo], server: ServicerTable) -> None:
        service.add(GenerationWorker(host, engine, gate, fetcher), server)

    kv: KvEventLog | None = None
    if isinstance(engine, KvEventSource):
        kv = KvEventLog()
        engine.follow_kv(kv)
    return WorkerPlan(
        engine=engine,
        role=role,
        model=model,
        operation=_OPERATIONS[role],
        services=(service.name,),
        add=add,
        describe=description_to_proto,
        max_open_tokens=lambda info: max_open_tokens or info.most_open_tokens,
        max_receive_bytes=_MAX_RECEIVE_BYTES,
        kv=kv,
        without_spans=(f"{service.name}/{service.stream}",),
        control=replace(
            control or ControlPlan(),
            controls=lambda: engine.controls if isinstance(engine, Controlled) else NO_CONTROLS,
        ),
    )


def _ticket_key(key: str, role: Role) -> TicketKey | None:
    if role is Role.DIFFUSION or not (key or role.hands_off):
        return None  # text alone: embeddings come with tickets
    if not key:
        raise SettingsError(
            "MILLSTREAM_TICKET_KEY is required: the same key, 32 random bytes in hex, for the "
            "Processor and all prefill, decode and encode workers (make one with "
            "`openssl rand -hex 32`)"
        )
    try:
        return TicketKey.from_hex(key)
    except ValueError as error:
        raise SettingsError(f"MILLSTREAM_TICKET_KEY: {error}") from error
