"""A Processor and its workers for images and video, in the test's process, on real sockets."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millstream.v1 import chat_pb2, media_pb2, processor_pb2
from millstream_server.control.engine import Role
from millstream_server.encode.encoder import EncoderInfo
from millstream_server.encode.fetching.fetch import EmbeddingFetcher
from millstream_server.encode.transfer.store import EmbeddingStore
from millstream_server.encode.transfer.ticket import EmbeddingTickets
from millstream_server.encode.worker.core import EncodeOptions
from millstream_server.encode.worker.pipeline import HostedEncoder, PipelineOptions
from millstream_server.encode.worker.servicer import make_plan, with_encoding
from millstream_server.engines.simulated.encoder import SimulatedEncoder, SimulatedEncoderConfig
from millstream_server.engines.simulated.engine import SimulatedConfig, SimulatedEngine
from millstream_server.generation.generator import GeneratorInfo, read_media_model
from millstream_server.media.items import MediaLimits
from millstream_server.processor.text.tokenizer import TextModel
from millstream_server.runtime.lifecycle.server import Server, ServerOptions
from millstream_server.worker.host import WorkerHost, WorkerPlan
from millstream_server.worker.servicer import SERVICE as WORKER
from millstream_testing import in_process
from millstream_testing.in_process import KEY, MODEL, InProcessProcessor, InProcessWorker

VOCAB_SIZE = 1024
CONTEXT_LENGTH = 8192
STORE_BYTES = 8 << 20
LIMITS = MediaLimits(
    max_item_bytes=2 << 20, max_pixels=1_000_000, max_frames=8, decode_timeout_s=5.0
)
TICKETS = EmbeddingTickets(KEY)


@dataclass
class InProcessEncoder:
    """A worker of the role ENCODE."""

    encoder: SimulatedEncoder
    engine: HostedEncoder
    host: WorkerHost[EncoderInfo]
    server: Server
    address: str


@contextlib.asynccontextmanager
async def encode_worker(
    directory: Path, *, limits: MediaLimits = LIMITS, **config: Any
) -> AsyncIterator[InProcessEncoder]:
    """Serve EncodeService with a simulated tower that fits the model in ``directory``."""
    engine, encoder = hosted_encoder(directory, limits, **config)
    host = WorkerHost(make_plan(engine, MODEL, EncodeOptions(tickets=TICKETS)))
    server = Server((*host.plan.services, WORKER), ServerOptions(max_receive_bytes=4 << 20))
    host.attach(server.methods, server.conditions)
    port = await server.listen("127.0.0.1:0")
    try:
        await host.load(lambda _: None)
        yield InProcessEncoder(encoder, engine, host, server, f"127.0.0.1:{port}")
    finally:
        await server.stop(0)
        await engine.close()


def hosted_encoder(
    directory: Path, limits: MediaLimits = LIMITS, **config: Any
) -> tuple[HostedEncoder, SimulatedEncoder]:
    """Make a simulated tower with what a worker puts around it."""
    model = read_media_model(directory, takes_pixels=False)
    assert model is not None
    encoder = SimulatedEncoder(
        SimulatedEncoderConfig(family=model.family, width=model.embedding_width, **config)
    )
    options = PipelineOptions(limits=limits, decoders=1)
    return HostedEncoder(encoder, EmbeddingStore(STORE_BYTES), options), encoder


def media_config(directory: Path, role: Role = Role.AGGREGATED, **config: Any) -> SimulatedConfig:
    """Configure a simulated engine for the model in ``directory``."""
    return SimulatedConfig(
        role=role,
        vocab_size=VOCAB_SIZE,
        context_length=CONTEXT_LENGTH,
        media=read_media_model(directory, takes_pixels=role is not Role.DECODE),
        **config,
    )


@contextlib.asynccontextmanager
async def media_worker(config: SimulatedConfig) -> AsyncIterator[InProcessWorker]:
    """Serve a worker that fetches what its prompts need."""
    fetcher = EmbeddingFetcher(TICKETS)
    async with in_process.worker(
        config, fetcher=None if config.role is Role.DECODE else fetcher
    ) as one:
        try:
            yield one
        finally:
            await fetcher.close()


@contextlib.asynccontextmanager
async def own_tower_worker(
    directory: Path, config: SimulatedConfig, **encoder: Any
) -> AsyncIterator[InProcessWorker]:
    """Serve an aggregated worker that encodes for itself."""
    engine, _ = hosted_encoder(directory, **encoder)
    fetcher = EmbeddingFetcher(TICKETS)

    def plan(generator: SimulatedEngine, role: Role) -> WorkerPlan[GeneratorInfo]:
        return with_encoding(
            in_process.plan_of(generator, role, fetcher),
            engine,
            EncodeOptions(tickets=TICKETS),
            fetcher.use_local,
        )

    async with in_process.worker(config, make=plan) as one:
        try:
            yield one
        finally:
            await fetcher.close()


@dataclass
class MediaSuite:
    """One Processor, one encode worker, and who generates."""

    front: InProcessProcessor
    encode: InProcessEncoder
    workers: Sequence[InProcessWorker]

    @property
    def stub(self) -> Any:
        return self.front.stub


@contextlib.asynccontextmanager
async def media_suite(
    directory: Path,
    *,
    hand_off: bool = True,
    encoder: dict[str, Any] | None = None,
    **config: Any,
) -> AsyncIterator[MediaSuite]:
    """Encode → Prefill → Decode, or with ``hand_off`` False Encode → aggregated Decode."""
    async with contextlib.AsyncExitStack() as parts:
        encode = await parts.enter_async_context(encode_worker(directory, **(encoder or {})))
        roles = (Role.PREFILL, Role.DECODE) if hand_off else (Role.AGGREGATED,)
        workers = [
            await parts.enter_async_context(media_worker(media_config(directory, role, **config)))
            for role in roles
        ]
        addresses = [encode.address, *(one.address for one in workers)]
        front = await parts.enter_async_context(
            in_process.processor({MODEL: TextModel.load(directory)}, addresses)
        )
        yield MediaSuite(front, encode, workers)


# ---- messages ------------------------------------------------------------------------------------


def image(data: bytes = b"", **source: Any) -> chat_pb2.ContentPart:
    """Make a part with an image: its bytes, or ``upload_id`` or ``url``."""
    return chat_pb2.ContentPart(image=media_pb2.Media(**source or {"data": data}))


def video(data: bytes) -> chat_pb2.ContentPart:
    """Make a part with a video."""
    return chat_pb2.ContentPart(video=media_pb2.Media(data=data))


def user(*parts: str | chat_pb2.ContentPart) -> chat_pb2.ChatMessage:
    """Make a user's message of texts and media, in order."""
    return chat_pb2.ChatMessage(
        role=chat_pb2.CHAT_ROLE_USER,
        content=[chat_pb2.ContentPart(text=p) if isinstance(p, str) else p for p in parts],
    )


def chunk(upload_id: str, data: bytes, total: int = 0) -> processor_pb2.ChatRequest:
    """Make a piece of an upload."""
    return processor_pb2.ChatRequest(
        media_chunk=media_pb2.MediaChunk(upload_id=upload_id, data=data, total_bytes=total)
    )
