"""Controls and files that wait to be sent to an encode worker."""

from __future__ import annotations

import asyncio
from collections import deque

from millstream.v1 import encode_pb2
from millstream_server.media.file import MediaFile
from millstream_server.protobuf.encode import write_item

INLINE_BYTES = 64 << 10
"""A file up to this size goes with its start: asking first would cost more."""
CHUNK_BYTES = 256 << 10
"""Larger ones hold up what is sent after them, and aren't faster."""


class UploadOutbox:
    """Collects messages, added anywhere on the event loop; one writer takes them.

    Controls go first. Files that the worker wants take turns, one chunk each, so that a large one
    doesn't delay the others. A chunk is copied only when it is taken.
    """

    def __init__(self) -> None:
        """Start empty."""
        self.filled = asyncio.Event()
        """Set when there may be a message to take; the writer clears it."""
        self._controls: deque[encode_pb2.EncodeRequest] = deque()
        self._uploads: dict[int, _Upload] = {}  # the first one is next

    def start(self, slot: int, file: MediaFile) -> None:
        """Add a start; if it can't be converted, raise and add nothing."""
        message = encode_pb2.EncodeRequest()
        write_item(message.start, slot, file, inline=len(file.data) <= INLINE_BYTES)
        self._add(message)

    def upload(self, slot: int, file: MediaFile) -> None:
        """Add a file's bytes, after the worker has asked for them."""
        self._uploads[slot] = _Upload(memoryview(file.data))
        self.filled.set()

    def cancel(self, slot: int) -> None:
        """Add a cancel, and send no more bytes."""
        self.ended(slot)
        self._add(encode_pb2.EncodeRequest(cancel=encode_pb2.CancelItem(slot=slot)))

    def ended(self, slot: int) -> None:
        """Send no more bytes for a slot."""
        self._uploads.pop(slot, None)

    def release(self, lease: str) -> None:
        """Add a release."""
        self._add(encode_pb2.EncodeRequest(release=encode_pb2.ReleaseLease(lease=lease)))

    def take(self) -> encode_pb2.EncodeRequest | None:
        """Remove and return the next message, None when there is none."""
        if self._controls:
            return self._controls.popleft()
        if not self._uploads:
            return None
        slot = next(iter(self._uploads))
        upload = self._uploads.pop(slot)
        message = encode_pb2.EncodeRequest()
        message.more.slot = slot
        message.more.data = upload.next_chunk()
        if upload.left:
            self._uploads[slot] = upload  # behind the others
        return message

    def _add(self, message: encode_pb2.EncodeRequest) -> None:
        self._controls.append(message)
        self.filled.set()


class _Upload:
    """What is left to send of a file."""

    __slots__ = ("left",)

    def __init__(self, data: memoryview) -> None:
        self.left = data

    def next_chunk(self) -> bytes:
        chunk, self.left = self.left[:CHUNK_BYTES], self.left[CHUNK_BYTES:]
        return bytes(chunk)
