"""Writes to a stream that the server may end meanwhile; large files go ahead in chunks."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Coroutine, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import grpc

from millstream.v1 import chat_pb2, diffusion_pb2, media_pb2, processor_pb2
from millstream_client.request import is_task_cancelled

INLINE_BYTES = 1 << 20
"""Most bytes of images and videos in one message; servers take messages of 4 MiB by default."""
INPUT_IMAGE_BYTES = 3 << 20
"""Of one in a request for images: Processors of version 0.1.0 take none in chunks."""
CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Upload:
    """A file that a message names by id."""

    id: str
    data: bytes

    def chunks(self, message: Any = processor_pb2.ChatRequest) -> Iterator[Any]:
        """Make its messages one at a time, so that only one copy of a chunk is in memory."""
        for start in range(0, len(self.data), CHUNK_BYTES):
            chunk = media_pb2.MediaChunk(
                upload_id=self.id,
                data=self.data[start : start + CHUNK_BYTES],
                total_bytes=0 if start else len(self.data),
            )
            yield message(media_chunk=chunk)


def take_uploads(request: processor_pb2.ChatRequest) -> list[Upload]:
    """Take the files that don't fit out of a message, which then names them by random ids.

    Small files stay in it, in their order, up to INLINE_BYTES together.
    """
    uploads: list[Upload] = []
    inline = 0
    for media in _files(request):
        size = len(media.data)
        if inline + size <= INLINE_BYTES:
            inline += size
            continue
        uploads.append(Upload(secrets.token_hex(16), media.data))
        media.upload_id = uploads[-1].id  # in place of the data
    return uploads


def take_input_image(request: Any) -> list[Upload]:
    """Do the same for the input image of a request for images, as such requests can have one."""
    if not isinstance(request, diffusion_pb2.GenerateImageRequest):
        return []
    image = request.start.input_image
    if len(image.data) <= INPUT_IMAGE_BYTES:
        return []
    upload = Upload(secrets.token_hex(16), image.data)
    image.ClearField("data")
    image.upload_id = upload.id
    return [upload]


def _files(request: processor_pb2.ChatRequest) -> Iterator[media_pb2.Media]:
    for part in _parts(request):
        kind = part.WhichOneof("part")
        if kind in ("image", "video"):
            media: media_pb2.Media = getattr(part, kind)
            if media.WhichOneof("source") == "data":
                yield media


def _parts(request: processor_pb2.ChatRequest) -> Iterable[chat_pb2.ContentPart]:
    if request.WhichOneof("message") == "user_turn":
        return request.user_turn.content
    of = request.start if request.HasField("start") else request.tool_results
    return (part for message in of.messages for part in message.content)


async def write(call: Any, message: Any) -> bool:
    """Send a message, when the server has room for it; return whether the stream was still open.

    If it wasn't, reading raises the status.
    """
    return await _unless_ended(call, call.write(message))


async def write_uploads(
    call: Any, uploads: Iterable[Upload], message: Any = processor_pb2.ChatRequest
) -> bool:
    """Send files in chunks, in messages of a type; return whether the stream was still open."""
    for upload in uploads:
        for chunk in upload.chunks(message):
            if not await write(call, chunk):
                return False
    return True


async def half_close(call: Any) -> bool:
    """Close our side of the stream; return whether it was still open."""
    return await _unless_ended(call, call.done_writing())


async def _unless_ended(call: Any, work: Coroutine[Any, Any, None]) -> bool:
    if call.done():
        work.close()
        return False
    writing = asyncio.ensure_future(work)
    # Otherwise grpc.aio's write never ends if its call is cancelled before it is connected, and
    # if the server ends the call, replaces its status by INTERNAL (grpc issue 36066).
    call.add_done_callback(lambda _: writing.cancel())
    try:
        await writing
    except (asyncio.InvalidStateError, grpc.RpcError, asyncio.CancelledError) as error:
        if is_task_cancelled(error):
            raise
        return False
    return True
