"""DiffusionService: converts requests, calls the core, converts responses."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

from millstream.v1 import diffusion_pb2, diffusion_pb2_grpc
from millstream_server.processor.core import ProcessorCore
from millstream_server.processor.diffusion.core import DiffusionCore
from millstream_server.processor.diffusion.text import TextForwarder
from millstream_server.processor.diffusion.text_output import CountedTexts
from millstream_server.processor.forwarding import serve
from millstream_server.protobuf.diffusion import (
    Content,
    image_from_proto,
    image_response,
    video_from_proto,
    video_response,
)
from millstream_server.runtime.lifecycle.drain import OpenWork
from millstream_server.runtime.rpc.call import Call
from millstream_server.runtime.rpc.slot_session import CancelSlot, Output, StartSlot
from millstream_server.synthesis.output import Chunk, Finished, Progress
from millstream_server.synthesis.request import DiffusionRequest
from millstream_server.worker.generation.session import WorkerSession

SERVICE = "millstream.v1.DiffusionService"


class _Stream:
    """The `SlotService` of one stream."""

    def __init__(
        self,
        core: DiffusionCore,
        work: OpenWork,
        call: Call,
        convert: Callable[[Any, Any], DiffusionRequest],
        response: Callable[[Content], Any],
    ) -> None:
        self.work = work
        self.streams = OpenWork()  # `serve` counts the stream
        self._core = core
        self._call = call
        self._convert = convert
        self.response = response

    def control(self, message: Any) -> StartSlot[DiffusionRequest] | CancelSlot:
        return serve.control(message, self._call, self._convert)

    async def run(self, request: DiffusionRequest, output: Output[Progress | Chunk]) -> Finished:
        return await self._core.run(request, output)


class DiffusionServicer(diffusion_pb2_grpc.DiffusionServiceServicer):
    """Serves DiffusionService."""

    def __init__(self, front: ProcessorCore, core: DiffusionCore, text: TextForwarder) -> None:
        """Serve with ``core``, and ``text`` for GenerateText; ``front`` knows of drains."""
        self._front = front
        self._core = core
        self._text = text

    async def GenerateText(
        self, request_iterator: AsyncIterator[diffusion_pb2.GenerateTextRequest], call: Call
    ) -> AsyncIterator[diffusion_pb2.GenerateTextResponse]:
        """Generate one stream's texts of token ids; see generation.proto for the rules."""
        texts = CountedTexts(self._text, self._text.unread, call.caller_key, call.fail)
        session = WorkerSession(texts, diffusion_pb2.GenerateTextResponse)
        with contextlib.closing(texts):
            async with contextlib.aclosing(session.responses(request_iterator)) as responses:
                async for response in responses:
                    texts.taken(session.frames.held_bytes)
                    yield response

    async def GenerateImage(
        self, request_iterator: AsyncIterator[diffusion_pb2.GenerateImageRequest], call: Call
    ) -> AsyncIterator[diffusion_pb2.GenerateImageResponse]:
        """Make one stream's images; see diffusion.proto for the rules."""
        stream = self._stream(call, image_from_proto, image_response)
        async with contextlib.aclosing(
            serve.serve(self._front, stream, request_iterator)
        ) as responses:
            async for response in responses:
                yield response

    async def GenerateVideo(
        self, request_iterator: AsyncIterator[diffusion_pb2.GenerateVideoRequest], call: Call
    ) -> AsyncIterator[diffusion_pb2.GenerateVideoResponse]:
        """Make one stream's videos; see diffusion.proto for the rules."""
        stream = self._stream(call, video_from_proto, video_response)
        async with contextlib.aclosing(
            serve.serve(self._front, stream, request_iterator)
        ) as responses:
            async for response in responses:
                yield response

    def _stream(
        self,
        call: Call,
        convert: Callable[[Any, Any], DiffusionRequest],
        response: Callable[[Content], Any],
    ) -> _Stream:
        return _Stream(self._core, self._front.work, call, convert, response)
