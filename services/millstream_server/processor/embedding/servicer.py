"""EmbeddingService: converts requests, calls the core, converts responses."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import replace

from millstream.v1 import embedding_pb2, embedding_pb2_grpc
from millstream_server.embedding.wire import (
    embed_from_proto,
    embed_response,
    ranking_to_proto,
    rerank_from_proto,
)
from millstream_server.processor.convert import new_request_id
from millstream_server.processor.embedding.core import VectorsCore
from millstream_server.processor.front import Front
from millstream_server.processor.slot_streams import Served, serve, trace_of
from millstream_server.runtime.rpc.call import Call
from millstream_server.runtime.telemetry.tracing import ambient

SERVICE = "millstream.v1.EmbeddingService"


class EmbeddingServicer(embedding_pb2_grpc.EmbeddingServiceServicer):
    """Serves EmbeddingService."""

    def __init__(self, front: Front, core: VectorsCore) -> None:
        self._front = front
        self._core = core
        self._batches = Served(embed_from_proto, core.embed, embed_response)

    def Embed(
        self, request_iterator: AsyncIterator[embedding_pb2.EmbedRequest], call: Call
    ) -> AsyncIterator[embedding_pb2.EmbedResponse]:
        return serve(self._front, self._batches, request_iterator, call)

    async def Rerank(
        self, request: embedding_pb2.RerankRequest, call: Call
    ) -> embedding_pb2.RerankResponse:
        left_s = call.time_left_s
        deadline_s = None if left_s is None else time.monotonic() + left_s
        with self._front.call():
            asked = rerank_from_proto(request, trace_of(call, ambient()), deadline_s)
            named = replace(asked, request_id=asked.request_id or new_request_id())
            return ranking_to_proto(await self._core.rerank(named))
