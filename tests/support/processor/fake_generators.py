"""A server of images, vectors and scores without models: what it returns can be worked out by hand.

- an image is the text ``PROMPT|SEED|FORMAT|INPUT BYTES`` as bytes, in two chunks, after a queue
  position and one progress entry per step; a prompt "lost …" fails the first time, retryable,
  "bad …" always, "slow …" stays at its first step, "cut …" ends the stream in the middle
- a vector is [length of the text, or sum of the ids, index of the input in its request]
- a document's logit is the number of words that it has in common with the query
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
import struct
from collections.abc import AsyncIterator, Iterator
from typing import Any

from millstream.v1 import (
    diffusion_pb2,
    diffusion_pb2_grpc,
    embedding_pb2,
    embedding_pb2_grpc,
    processor_pb2_grpc,
)
from millstream_server.processor.app import SERVICES
from millstream_server.protobuf.errors import error_to_proto
from millstream_server.runtime.errors import (
    InvalidRequestError,
    ServingError,
    UnsupportedFeatureError,
    WorkerLostError,
)
from millstream_server.runtime.lifecycle.server import Server, ServerOptions
from millstream_server.runtime.transport.options import TransportOptions
from millstream_testing.fake_processor import FakeProcessor
from tests.support.clients.clients import tell_serving

STEPS = 3


class FakeDiffusion(diffusion_pb2_grpc.DiffusionServiceServicer):
    """Serves images and videos."""

    def __init__(self) -> None:
        self.starts: list[Any] = []
        self.open = 0

    async def GenerateText(
        self, request_iterator: AsyncIterator[diffusion_pb2.GenerateTextRequest], call: Any
    ) -> AsyncIterator[diffusion_pb2.GenerateTextResponse]:
        raise UnsupportedFeatureError("this server makes no text")
        yield

    async def GenerateImage(
        self, request_iterator: AsyncIterator[diffusion_pb2.GenerateImageRequest], call: Any
    ) -> AsyncIterator[diffusion_pb2.GenerateImageResponse]:
        async for response in self._serve(request_iterator, diffusion_pb2.GenerateImageResponse):
            yield response

    async def GenerateVideo(
        self, request_iterator: AsyncIterator[diffusion_pb2.GenerateVideoRequest], call: Any
    ) -> AsyncIterator[diffusion_pb2.GenerateVideoResponse]:
        async for response in self._serve(request_iterator, diffusion_pb2.GenerateVideoResponse):
            yield response

    async def _serve(self, requests: AsyncIterator[Any], kind: type[Any]) -> AsyncIterator[Any]:
        self.open += 1
        try:
            uploads: dict[str, bytes] = {}
            async for request in requests:
                if request.WhichOneof("control") == "media_chunk":
                    chunk = request.media_chunk
                    uploads[chunk.upload_id] = uploads.get(chunk.upload_id, b"") + chunk.data
                    continue
                if isinstance(request, diffusion_pb2.GenerateImageRequest):
                    given = request.start.input_image
                    given.data = given.data or uploads.get(given.upload_id, b"")
                for entries in self._answer(request.start):
                    if entries is None:
                        await asyncio.Event().wait()
                        continue
                    yield kind(**entries)
                    if request.start.options.prompt.startswith("cut") and "chunks" in entries:
                        return
        finally:
            self.open -= 1

    def _answer(self, start: Any) -> Iterator[dict[str, Any] | None]:
        self.starts.append(start)
        word = start.options.prompt.partition(" ")[0]
        yield {"progress": [_progress(start.slot, queue_position=2)]}
        for step in range(1, STEPS + 1):
            yield {"progress": [_progress(start.slot, step=step, steps=STEPS, preview=b"small")]}
            if word == "slow":
                yield None
        if failure := self._failure(word):
            error = diffusion_pb2.DiffusionError(slot=start.slot, error=error_to_proto(failure))
            yield {"errors": [error]}
            return
        yield from _files(start)

    def _failure(self, word: str) -> ServingError | None:
        if word == "bad":
            return InvalidRequestError.of("options.steps", "is -1; give 1 to 50")
        if word == "lost" and len(self.starts) == 1:
            return WorkerLostError("the worker went away", retry_delay_s=0.0)
        return None


def _progress(slot: int, **fields: Any) -> diffusion_pb2.DiffusionProgress:
    return diffusion_pb2.DiffusionProgress(slot=slot, **fields)


def _files(start: Any) -> Iterator[dict[str, Any]]:
    options, is_video = start.options, isinstance(start, diffusion_pb2.StartVideo)
    outputs = []
    for i in range(options.n or 1):
        seed = options.seed + i
        given = b"" if is_video else start.input_image.data
        kind = start.frames if is_video else start.format
        data = f"{options.prompt}|{seed}|{kind}|".encode() + given
        for part, last in ((data[:4], False), (data[4:], True)):
            chunk = diffusion_pb2.OutputChunk(slot=start.slot, output=i, data=part, last=last)
            yield {"chunks": [chunk]}
        media_type = "video/mp4" if is_video else "image/png"
        outputs.append(
            diffusion_pb2.DiffusionOutput(seed=seed, total_bytes=len(data), media_type=media_type)
        )
    end = diffusion_pb2.DiffusionFinished(
        slot=start.slot,
        request_id=start.request_id or "made-here",
        settings=diffusion_pb2.DiffusionSettings(seed=options.seed, steps=STEPS),
        outputs=outputs,
    )
    yield {"finished": [end]}


class FakeEmbedding(embedding_pb2_grpc.EmbeddingServiceServicer):
    """Serves vectors and scores."""

    def __init__(self) -> None:
        self.starts: list[embedding_pb2.StartEmbed] = []
        self.reranks: list[embedding_pb2.RerankRequest] = []

    async def Embed(
        self, request_iterator: AsyncIterator[embedding_pb2.EmbedRequest], call: Any
    ) -> AsyncIterator[embedding_pb2.EmbedResponse]:
        async for request in request_iterator:
            start = request.start
            self.starts.append(start)
            for i in reversed(range(len(start.inputs))):
                yield embedding_pb2.EmbedResponse(
                    vectors=[
                        embedding_pb2.EmbeddingVectors(
                            slot=start.slot, indices=[i], dimensions=2, values=_vector(start, i)
                        )
                    ]
                )
            usage = embedding_pb2.EmbeddingUsage(input_tokens=len(start.inputs))
            finished = embedding_pb2.EmbedFinished(slot=start.slot, model="fake", usage=usage)
            yield embedding_pb2.EmbedResponse(finished=[finished])

    async def Rerank(
        self, request: embedding_pb2.RerankRequest, call: Any
    ) -> embedding_pb2.RerankResponse:
        self.reranks.append(request)
        words = _words(request.query)
        results = [
            _ranked(i, len(words & _words(document)))
            for i, document in enumerate(request.documents)
        ]
        results.sort(key=lambda ranked: (-ranked.logit, ranked.index))
        return embedding_pb2.RerankResponse(
            results=results[: request.top_n if request.HasField("top_n") else None]
        )


def _words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text.lower()))


def _ranked(index: int, common: int) -> embedding_pb2.RankedDocument:
    score = 1 / (1 + math.exp(-common))
    return embedding_pb2.RankedDocument(index=index, logit=common, score=score)


def _vector(start: embedding_pb2.StartEmbed, index: int) -> bytes:
    part = start.inputs[index]
    size = len(part.text) if part.WhichOneof("input") == "text" else sum(part.token_ids.ids)
    return struct.pack("<2f", size, index)


@contextlib.asynccontextmanager
async def generators(
    diffusion: FakeDiffusion, embedding: FakeEmbedding, options: ServerOptions | None = None
) -> AsyncIterator[str]:
    """Serve both on one port, beside a Processor; yield the address."""
    server = Server(
        SERVICES,
        options
        or ServerOptions(
            max_receive_bytes=4 << 20, clients=TransportOptions(max_receive_bytes=4 << 20)
        ),
    )
    processor_pb2_grpc.add_ProcessorServiceServicer_to_server(FakeProcessor(), server.methods)
    diffusion_pb2_grpc.add_DiffusionServiceServicer_to_server(diffusion, server.methods)
    embedding_pb2_grpc.add_EmbeddingServiceServicer_to_server(embedding, server.methods)
    port = await server.listen("127.0.0.1:0")
    await tell_serving(server, serving=True)
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)
