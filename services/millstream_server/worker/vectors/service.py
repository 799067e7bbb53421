"""A worker of the role EMBEDDING."""

from __future__ import annotations

from functools import partial

from millstream.v1 import embedding_pb2_grpc
from millstream_server.engines.base import Role
from millstream_server.protobuf.worker import description_to_proto
from millstream_server.runtime.rpc.channel import MAX_WORKER_MESSAGE_BYTES
from millstream_server.runtime.rpc.serving import ServicerTable
from millstream_server.vectors.embedder import Embedder, EmbedderInfo
from millstream_server.worker.host import WorkerHost, WorkerPlan
from millstream_server.worker.vectors.core import VectorWorker
from millstream_server.worker.vectors.servicer import SERVICE, STREAM, EmbeddingServicer
from millstream_server.worker.vectors.settings import VectorSettings

_OPEN_BATCHES = 256


def make_plan(
    engine: Embedder, model: str, settings: VectorSettings | None = None
) -> WorkerPlan[EmbedderInfo]:
    """Make a worker's plan."""
    chosen = settings or VectorSettings()

    def add(host: WorkerHost[EmbedderInfo], server: ServicerTable) -> None:
        worker = VectorWorker(engine, model, host.requests, host.loaded, chosen.max_batch_tokens)
        servicer = EmbeddingServicer(worker, host.work, host.streams)
        embedding_pb2_grpc.add_EmbeddingServiceServicer_to_server(servicer, server)

    return WorkerPlan(
        engine=engine,
        role=Role.EMBEDDING,
        model=model,
        operation="embeddings",
        services=(SERVICE,),
        add=add,
        describe=description_to_proto,
        max_open_tokens=partial(_most_open_tokens, chosen.max_open_tokens),
        max_receive_bytes=MAX_WORKER_MESSAGE_BYTES,
        without_spans=(STREAM,),
    )


def _most_open_tokens(setting: int, info: EmbedderInfo) -> int:
    return setting or _OPEN_BATCHES * info.max_batch_tokens
