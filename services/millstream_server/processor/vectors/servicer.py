"""EmbeddingService: converts requests, calls the core, converts responses."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import replace

from millstream.v1 import embedding_pb2, embedding_pb2_grpc
from millstream_server.processor.convert import new_request_id
from millstream_server.processor.core import ProcessorCore
from millstream_server.processor.forwarding import serve
from millstream_server.processor.vectors.core import VectorsCore
from millstream_server.protobuf.embedding import (
    Content,
    embed_from_proto,
    embed_response,
    ranking_to_proto,
    rerank_from_proto,
)
from millstream_server.runtime.lifecycle.drain import OpenWork
from millstream_server.runtime.rpc.call import Call
from millstream_server.runtime.rpc.slot_session import CancelSlot, Output, StartSlot
from millstream_server.runtime.telemetry.tracing import ambient
from millstream_server.vectors.output import EmbedFinished, Vectors
from millstream_server.vectors.request import EmbedRequest

SERVICE = "millstream.v1.EmbeddingService"


class _Stream:
    """The `SlotService` of one stream."""

    def __init__(self, core: VectorsCore, work: OpenWork, call: Call) -> None:
        self.work = work
        self.streams = OpenWork()  # `serve` counts the stream
        self._core = core
        self._call = call

    def control(self, message: embedding_pb2.EmbedRequest) -> StartSlot[EmbedRequest] | CancelSlot:
        return serve.control(message, self._call, embed_from_proto)

    async def run(self, request: EmbedRequest, output: Output[Vectors]) -> EmbedFinished:
        return await self._core.embed(request, output)

    def response(self, content: Content) -> embedding_pb2.EmbedResponse:
        return embed_response(content)


class EmbeddingServicer(embedding_pb2_grpc.EmbeddingServiceServicer):
    """Serves EmbeddingService."""

    def __init__(self, front: ProcessorCore, core: VectorsCore) -> None:
        """Serve with ``core``; ``front`` knows whether the process drains."""
        self._front = front
        self._core = core

    async def Embed(
        self, request_iterator: AsyncIterator[embedding_pb2.EmbedRequest], call: Call
    ) -> AsyncIterator[embedding_pb2.EmbedResponse]:
        """Embed one stream's batches; see embedding.proto for the rules."""
        stream = _Stream(self._core, self._front.work, call)
        async with contextlib.aclosing(
            serve.serve(self._front, stream, request_iterator)
        ) as responses:
            async for response in responses:
                yield response

    async def Rerank(
        self, request: embedding_pb2.RerankRequest, call: Call
    ) -> embedding_pb2.RerankResponse:
        """Rank documents."""
        left_s = call.time_left_s
        deadline_s = None if left_s is None else time.monotonic() + left_s
        with self._front.call():
            asked = rerank_from_proto(request, serve.trace_of(call, ambient()), deadline_s)
            named = replace(asked, request_id=asked.request_id or new_request_id())
            return ranking_to_proto(await self._core.rerank(named))
