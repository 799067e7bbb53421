"""EmbeddingService on a worker: its streams, its settings, the worker's plan."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass

from millstream.v1 import embedding_pb2, embedding_pb2_grpc
from millstream_server.control.engine import Role
from millstream_server.embedding.embedder import Embedder, EmbedderInfo
from millstream_server.embedding.wire import (
    embed_from_proto,
    embed_response,
    ranking_to_proto,
    rerank_from_proto,
)
from millstream_server.embedding.worker.core import VectorWorker
from millstream_server.protobuf.common import SlotCalls
from millstream_server.runtime.drain import OpenWork
from millstream_server.runtime.rpc.call import Call
from millstream_server.runtime.rpc.channel import MAX_WORKER_MESSAGE_BYTES
from millstream_server.runtime.rpc.serving import ServicerTable
from millstream_server.runtime.rpc.slot_session import SlotSession
from millstream_server.runtime.settings import setting
from millstream_server.runtime.telemetry.tracing import ambient
from millstream_server.worker.host import WorkerHost, WorkerPlan
from millstream_server.worker_info import description_to_proto


@dataclass(frozen=True, slots=True, kw_only=True)
class VectorSettings:
    """How requests are batched and bounded; 0 leaves it to the engine."""

    max_batch_tokens: int = setting(
        0, help="most tokens of a batch for the engine; 0: what the engine runs at once"
    )
    max_open_tokens: int = setting(
        0, help="most tokens of open requests; 0: 256 batches of what the engine runs at once"
    )


SERVICE = "millstream.v1.EmbeddingService"
STREAM = f"{SERVICE}/Embed"


class VectorServicer(embedding_pb2_grpc.EmbeddingServiceServicer):
    """Serves EmbeddingService from one engine."""

    def __init__(self, worker: VectorWorker, work: OpenWork, streams: OpenWork) -> None:
        self._worker = worker
        self._slots = SlotCalls(work, streams, worker.embed, embed_from_proto, embed_response)

    def Embed(
        self, request_iterator: AsyncIterator[embedding_pb2.EmbedRequest], call: Call
    ) -> AsyncGenerator[embedding_pb2.EmbedResponse, None]:
        return SlotSession(self._slots).responses(request_iterator)

    async def Rerank(
        self, request: embedding_pb2.RerankRequest, call: Call
    ) -> embedding_pb2.RerankResponse:
        left_s = call.time_left_s
        deadline_s = None if left_s is None else time.monotonic() + left_s
        ranking = await self._worker.rerank(rerank_from_proto(request, ambient(), deadline_s))
        return ranking_to_proto(ranking)


_OPEN_BATCHES = 256


def make_plan(
    engine: Embedder, model: str, settings: VectorSettings | None = None
) -> WorkerPlan[EmbedderInfo]:
    """Make a worker's plan."""
    chosen = settings or VectorSettings()

    def add(host: WorkerHost[EmbedderInfo], server: ServicerTable) -> None:
        worker = VectorWorker(engine, model, host.requests, host.loaded, chosen.max_batch_tokens)
        servicer = VectorServicer(worker, host.work, host.streams)
        embedding_pb2_grpc.add_EmbeddingServiceServicer_to_server(servicer, server)

    return WorkerPlan(
        engine=engine,
        role=Role.EMBEDDING,
        model=model,
        operation="embeddings",
        services=(SERVICE,),
        add=add,
        describe=description_to_proto,
        max_open_tokens=lambda info: (
            chosen.max_open_tokens or _OPEN_BATCHES * info.max_batch_tokens
        ),
        max_receive_bytes=MAX_WORKER_MESSAGE_BYTES,
        without_spans=(STREAM,),
    )
