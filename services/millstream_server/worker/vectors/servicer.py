"""EmbeddingService on a worker."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator

from millstream.v1 import embedding_pb2, embedding_pb2_grpc
from millstream_server.protobuf.common import control_of
from millstream_server.protobuf.embedding import (
    embed_from_proto,
    embed_response,
    ranking_to_proto,
    rerank_from_proto,
)
from millstream_server.runtime.lifecycle.drain import OpenWork
from millstream_server.runtime.rpc.call import Call
from millstream_server.runtime.rpc.slot_session import CancelSlot, SlotSession, StartSlot
from millstream_server.runtime.telemetry.tracing import ambient
from millstream_server.vectors.request import EmbedRequest
from millstream_server.worker.vectors.core import VectorWorker

SERVICE = "millstream.v1.EmbeddingService"
STREAM = f"{SERVICE}/Embed"


class EmbedSlots:
    """Satisfies `runtime.rpc.slot_session.SlotService`: an Embed stream's batches."""

    def __init__(self, worker: VectorWorker, work: OpenWork, streams: OpenWork) -> None:
        """Run batches on ``worker``."""
        self.work = work
        self.streams = streams
        self.run = worker.embed
        self.response = embed_response

    def control(self, message: embedding_pb2.EmbedRequest) -> StartSlot[EmbedRequest] | CancelSlot:
        """See `SlotService.control`."""
        return control_of(message, embed_from_proto)


class EmbeddingServicer(embedding_pb2_grpc.EmbeddingServiceServicer):
    """Serves EmbeddingService from one engine."""

    def __init__(self, worker: VectorWorker, work: OpenWork, streams: OpenWork) -> None:
        """Embed and rank on ``worker``; ``streams`` counts Embed streams."""
        self._worker = worker
        self._slots = EmbedSlots(worker, work, streams)

    def Embed(
        self, request_iterator: AsyncIterator[embedding_pb2.EmbedRequest], call: Call
    ) -> AsyncGenerator[embedding_pb2.EmbedResponse, None]:
        """Embed one stream's batches; see embedding.proto for the rules."""
        return SlotSession(self._slots).responses(request_iterator)

    async def Rerank(
        self, request: embedding_pb2.RerankRequest, call: Call
    ) -> embedding_pb2.RerankResponse:
        """Score pairs of query and document."""
        left_s = call.time_left_s
        deadline_s = None if left_s is None else time.monotonic() + left_s
        ranking = await self._worker.rerank(rerank_from_proto(request, ambient(), deadline_s))
        return ranking_to_proto(ranking)
