"""DiffusionService and EmbeddingService at the Processor: slot streams, forwarded to workers."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from millstream.v1 import diffusion_pb2, diffusion_pb2_grpc, embedding_pb2, embedding_pb2_grpc
from millstream_server.diffusion.request import MAX_INPUT_BYTES
from millstream_server.diffusion.wire import (
    image_from_proto,
    image_response,
    video_from_proto,
    video_response,
)
from millstream_server.embedding.wire import (
    embed_from_proto,
    embed_response,
    ranking_to_proto,
    rerank_from_proto,
)
from millstream_server.generation.worker.session import WorkerSession
from millstream_server.processor.diffusion.core import DiffusionCore
from millstream_server.processor.diffusion.text import CountedTexts, TextForwarder
from millstream_server.processor.embedding.core import VectorsCore
from millstream_server.processor.front import Front
from millstream_server.processor.media.uploads import MediaBudget, Uploads
from millstream_server.protobuf.common import control_of
from millstream_server.runtime.drain import OpenWork
from millstream_server.runtime.errors import InvalidRequestError, UnavailableError
from millstream_server.runtime.request_id import new_request_id
from millstream_server.runtime.rpc.call import Call
from millstream_server.runtime.rpc.slot_session import (
    CancelSlot,
    Output,
    Response,
    SlotSession,
    StartSlot,
)
from millstream_server.runtime.telemetry.trace_context import NOT_TRACED, TraceContext, incoming
from millstream_server.runtime.telemetry.tracing import ambient

ResponseT = TypeVar("ResponseT", bound=Response)
RequestT = TypeVar("RequestT")
EntryT = TypeVar("EntryT")
EndT = TypeVar("EndT")

_HALF_CLOSE_S = 1.0
"""How long a client that was told of the shutdown may send further requests."""


DIFFUSION = "millstream.v1.DiffusionService"
EMBEDDING = "millstream.v1.EmbeddingService"


class DiffusionServicer(diffusion_pb2_grpc.DiffusionServiceServicer):
    """Serves DiffusionService; the rules are in diffusion.proto and generation.proto."""

    def __init__(
        self, front: Front, core: DiffusionCore, text: TextForwarder, budget: MediaBudget
    ) -> None:
        """Serve; the bytes of input images in chunks count in ``budget`` until they are named."""
        self._front = front
        self._budget = budget
        self._images = Served(image_from_proto, core.run, image_response)
        self._videos = Served(video_from_proto, core.run, video_response)
        self._text = text

    async def GenerateText(
        self, request_iterator: AsyncIterator[diffusion_pb2.GenerateTextRequest], call: Call
    ) -> AsyncIterator[diffusion_pb2.GenerateTextResponse]:
        texts = CountedTexts(self._text, self._text.unread, call.caller_key, call.fail)
        session = WorkerSession(texts, diffusion_pb2.GenerateTextResponse)
        with contextlib.closing(texts):
            async with contextlib.aclosing(session.responses(request_iterator)) as responses:
                async for response in responses:
                    texts.taken(session.frames.held_bytes)
                    yield response

    def GenerateImage(
        self, request_iterator: AsyncIterator[diffusion_pb2.GenerateImageRequest], call: Call
    ) -> AsyncIterator[diffusion_pb2.GenerateImageResponse]:
        uploads = Uploads(self._budget, MAX_INPUT_BYTES)
        return serve(self._front, self._images, request_iterator, call, uploads)

    def GenerateVideo(
        self, request_iterator: AsyncIterator[diffusion_pb2.GenerateVideoRequest], call: Call
    ) -> AsyncIterator[diffusion_pb2.GenerateVideoResponse]:
        return serve(self._front, self._videos, request_iterator, call)


class EmbeddingServicer(embedding_pb2_grpc.EmbeddingServiceServicer):
    """Serves EmbeddingService; the rules are in embedding.proto."""

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


# ---- a stream of any of them ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Served(Generic[RequestT, EntryT, EndT, ResponseT]):
    """How the requests of one RPC are read, run and answered."""

    from_proto: Callable[[Any, TraceContext], RequestT]
    """Converts a `start`, in the trace that it comes with."""
    run: Callable[[RequestT, Output[EntryT]], Coroutine[Any, Any, EndT]]
    to_proto: Callable[[Any], ResponseT]
    """Converts entries and ends."""


async def serve(
    front: Front,
    served: Served[Any, Any, Any, ResponseT],
    requests: AsyncIterator[Any],
    call: Call,
    uploads: Uploads | None = None,
) -> AsyncGenerator[ResponseT, None]:
    """Run one stream's requests; yield what is sent back.

    ``uploads`` takes files in chunks; None: no message of the stream has any.

    Raises:
        UnavailableError: this Processor is shutting down, or a file comes too slowly.
    """
    closing = contextlib.nullcontext() if uploads is None else contextlib.closing(uploads)
    with front.call(), closing:
        messages = _ClientMessages(requests, front.work, uploads)
        session = SlotSession(_Stream(front.work, served, call, uploads))
        async with contextlib.aclosing(session.responses(messages.read())) as responses:
            async for response in responses:
                yield response
        messages.check()


class _Stream:
    """The `SlotService` of one stream."""

    def __init__(
        self,
        work: OpenWork,
        served: Served[Any, Any, Any, Any],
        call: Call,
        uploads: Uploads | None,
    ) -> None:
        self._uploads = uploads
        self.work = work
        self.streams = OpenWork()  # `serve` counts the stream
        self.run = served.run
        self.response = served.to_proto
        self._from_proto = served.from_proto
        self._call = call

    def control(self, message: Any) -> StartSlot[Any] | CancelSlot | None:
        """Read a message whose oneof is `start` or `cancel`, or take in a piece of a file.

        The request gets an id if its client sent none, and the RPC's deadline if that is sooner.

        Raises:
            InvalidRequestError: it is neither, or breaks the rules of uploads.
            OverloadedError: there is no memory for the piece.
        """
        uploads = self._uploads
        if uploads is not None and message.HasField("media_chunk"):
            chunk = message.media_chunk
            uploads.add(chunk.upload_id, chunk.data, chunk.total_bytes)
            return None
        left_s = self._call.time_left_s
        rpc_deadline_s = None if left_s is None else time.monotonic() + left_s

        def read(start: Any, trace: TraceContext) -> Any:
            if uploads is not None and start.input_image.upload_id:
                _fill_in(start.input_image, uploads)
            request = self._from_proto(start, trace_of(self._call, trace))
            deadlines = [s for s in (request.deadline_s, rpc_deadline_s) if s is not None]
            return replace(
                request,
                request_id=request.request_id or new_request_id(),
                deadline_s=min(deadlines, default=None),
            )

        return control_of(message, read)


def _fill_in(image: diffusion_pb2.InputImage, uploads: Uploads) -> None:
    """Put the bytes of an upload where it is named; the request counts them from now on.

    Raises:
        InvalidRequestError: there is no such upload, it isn't complete, or there is `data` too.
    """
    field = "input_image.upload_id"
    if image.data:
        raise InvalidRequestError.of(field, "comes with `data`: set one of them")
    pieces = uploads.take(image.upload_id, field)
    image.ClearField("upload_id")
    image.data = b"".join(pieces)
    uploads.hold.give_back(len(image.data))


def trace_of(call: Call, current: TraceContext) -> TraceContext:
    """Return the ``current`` trace or, without tracing in this process, the caller's own."""
    return incoming(call.metadata) if current == NOT_TRACED else current


class _ClientMessages:
    """Reads on for a second after a shutdown was announced; requests read by then still run.

    A worker would wait until its callers close their streams. A client may never do it.
    """

    def __init__(
        self, messages: AsyncIterator[Any], work: OpenWork, uploads: Uploads | None
    ) -> None:
        self._messages = messages
        self._work = work
        self._uploads = uploads
        self._until_s: float | None = None
        self._timeout: asyncio.Timeout | None = None
        self._cut = False

    def check(self) -> None:
        """Check that the client closed its side itself; call it when all requests have ended.

        Raises:
            UnavailableError: reading was ended by the shutdown.
        """
        if self._cut:
            raise UnavailableError(
                "this server is shutting down; continue on another one", retry_delay_s=0.1
            )

    async def read(self) -> AsyncIterator[Any]:
        forget = self._work.when_leaving(self._leave)
        try:
            while (message := await self._next()) is not None:
                yield message
        finally:
            forget()

    def _leave(self) -> None:
        self._until_s = asyncio.get_running_loop().time() + _HALF_CLOSE_S
        if self._timeout is not None:
            self._timeout.reschedule(self._until_s)

    async def _next(self) -> Any:
        left_s = None if self._uploads is None else self._uploads.left_s
        late_s = None if left_s is None else asyncio.get_running_loop().time() + left_s
        until_s = min((s for s in (self._until_s, late_s) if s is not None), default=None)
        try:
            async with asyncio.timeout_at(until_s) as self._timeout:
                return await anext(self._messages, None)
        except TimeoutError as error:
            if self._uploads is not None and self._uploads.left_s == 0:
                raise self._uploads.too_slow() from error
            self._cut = True
            return None
        finally:
            self._timeout = None
