"""Vectors, scores and images of Processors: each request is a slot stream of its own."""

from __future__ import annotations

import contextlib
from typing import Any

from millstream.v1 import embedding_pb2
from millstream_server.diffusion.checks import seed_violation
from millstream_server.diffusion.diffuser import ImageDefaults
from millstream_server.diffusion.request import Chunk, DiffusionRequest, Finished, Progress
from millstream_server.door import wire
from millstream_server.door.processors import Processors, gone
from millstream_server.door.texts import RemoteTexts
from millstream_server.embedding.request import (
    EmbedFinished,
    EmbedRequest,
    Ranking,
    RerankRequest,
    Vectors,
)
from millstream_server.embedding.wire import ranking_from_proto, rerank_to_proto
from millstream_server.links.channel import rpc_of
from millstream_server.links.entry_stream import DIFFUSION, EMBED, EntryRpc
from millstream_server.runtime.errors import InvalidRequestError, NoWorkerError
from millstream_server.runtime.rpc.slot_session import EndT, EntryT, Output

_RERANK = rpc_of(embedding_pb2.DESCRIPTOR, "EmbeddingService/Rerank")
_SLOT = 0


class RemoteVectors:
    """`processor.http.pipeline.VectorMaker`; one per process."""

    def __init__(self, processors: Processors) -> None:
        self._processors = processors

    async def embed(self, request: EmbedRequest, output: Output[Vectors]) -> EmbedFinished:
        return await run(self._processors, EMBED, request, output)

    async def rerank(self, request: RerankRequest) -> Ranking:
        message = wire.sendable(lambda: rerank_to_proto(request))
        found = await self._processors.call(
            _RERANK, message, deadline_s=request.deadline_s, trace=request.trace
        )
        return ranking_from_proto(found)


class RemoteImages:
    """`processor.http.pipeline.ImageMaker`; one per process."""

    def __init__(self, processors: Processors, texts: RemoteTexts) -> None:
        """``texts`` knows the models."""
        self._processors = processors
        self._texts = texts

    async def run(self, request: DiffusionRequest, output: Output[Progress | Chunk]) -> Finished:
        if request.seed is not None and request.seed < 0:  # no message can say it
            raise InvalidRequestError.of_all([seed_violation(request.seed)])
        return await run(self._processors, DIFFUSION[request.kind], request, output)

    async def defaults(self, model: str) -> ImageDefaults:
        found = wire.image_defaults(await self._texts.served(), model)
        if found is None:
            sentence = "no model for images of this name is in service; retry in a moment"
            raise NoWorkerError(sentence, retry_delay_s=1.0)
        return found


async def run(
    processors: Processors,
    rpc: EntryRpc[Any, EntryT, EndT],
    request: Any,
    output: Output[EntryT],
) -> EndT:
    """Run a request at a Processor; its entries go to ``output``.

    Raises:
        ServingError: it failed.
    """

    def check(message: Any) -> None:
        for _, error in rpc.content(message).errors:
            raise error

    stream = await processors.stream(
        rpc.rpc,
        wire.sendable(lambda: rpc.start(_SLOT, request)),
        deadline_s=request.deadline_s,
        trace=request.trace,
        requests=True,
        check=check,
    )
    with contextlib.closing(stream):
        while (message := await stream.read()) is not None:
            content = rpc.content(message)
            for _, error in content.errors:
                raise error
            for _, entry in content.latest:
                output.latest(entry)
            for _, entry in content.entries:
                await output.put(entry, rpc.nbytes(entry))
            for _, end in content.finished:
                return end
    raise gone()
