"""Images and videos that are too large for one message: they go ahead of it, in chunks."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from millstream.v1 import chat_pb2, media_pb2, processor_pb2

INLINE_BYTES = 1 << 20
"""Most bytes of images and videos in one message; servers take messages of 4 MiB by default."""
CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Upload:
    """A file that a message names by id."""

    id: str
    data: bytes

    def chunks(self) -> Iterator[processor_pb2.ChatRequest]:
        """Make its messages one at a time, so that only one copy of a chunk is in memory."""
        for start in range(0, len(self.data), CHUNK_BYTES):
            chunk = media_pb2.MediaChunk(
                upload_id=self.id,
                data=self.data[start : start + CHUNK_BYTES],
                total_bytes=0 if start else len(self.data),
            )
            yield processor_pb2.ChatRequest(media_chunk=chunk)


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
