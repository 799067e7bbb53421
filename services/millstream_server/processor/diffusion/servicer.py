"""DiffusionService: converts requests, calls the core, converts responses."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from millstream.v1 import diffusion_pb2, diffusion_pb2_grpc
from millstream_server.diffusion.wire import (
    image_from_proto,
    image_response,
    video_from_proto,
    video_response,
)
from millstream_server.generation.worker.session import WorkerSession
from millstream_server.processor.diffusion.core import DiffusionCore
from millstream_server.processor.diffusion.text import CountedTexts, TextForwarder
from millstream_server.processor.front import Front
from millstream_server.processor.slot_streams import Served, serve
from millstream_server.runtime.rpc.call import Call

SERVICE = "millstream.v1.DiffusionService"


class DiffusionServicer(diffusion_pb2_grpc.DiffusionServiceServicer):
    """Serves DiffusionService."""

    def __init__(self, front: Front, core: DiffusionCore, text: TextForwarder) -> None:
        self._front = front
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
        return serve(self._front, self._images, request_iterator, call)

    def GenerateVideo(
        self, request_iterator: AsyncIterator[diffusion_pb2.GenerateVideoRequest], call: Call
    ) -> AsyncIterator[diffusion_pb2.GenerateVideoResponse]:
        return serve(self._front, self._videos, request_iterator, call)
