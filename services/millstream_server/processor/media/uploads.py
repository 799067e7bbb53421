"""Files that a client sends in chunks, before the message that names them."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from millstream_server.runtime.errors import InvalidRequestError, UnavailableError
from millstream_server.runtime.memory import trim_in_background
from millstream_server.runtime.rpc.ledger import Hold, Ledger
from millstream_server.runtime.telemetry import metrics

MAX_UPLOADS = 64
"""Uploads of a conversation that no message has named yet."""
MIN_BYTES_PER_S = 32 << 10
"""Slowest pace of a client that has begun to send a file."""
IDLE_S = 10.0
"""How far the client may be behind that while a file isn't complete."""
_MAX_ID_BYTES = 128
_TRIM_BYTES = 64 << 20
"""After so many bytes it is worth to give the heaps' free memory back."""
_PIECE_BYTES = 64 << 10
"""Smaller chunks are put together: each object in memory takes some 50 bytes more."""


class MediaBudget(Ledger):
    """The memory that clients' images and videos may take; one per process."""

    def __init__(self, max_bytes: int) -> None:
        super().__init__(
            max_bytes,
            cause="media",
            busy="the server is busy: images and videos of open conversations fill the {most} "
            "bytes it has for them; retry later",
        )
        self._freed_bytes = 0
        metrics.MEDIA_BYTES.set_function(lambda: self.used)

    def give_back(self, amount: int) -> None:
        super().give_back(amount)
        self._freed_bytes += amount
        if not self.used and self._freed_bytes >= _TRIM_BYTES:
            self._freed_bytes = 0
            trim_in_background()


@dataclass(slots=True)
class _Upload:
    """Keeps chunks as they came: to copy 64 MiB here would hold up the event loop for 0.1 s."""

    total: int
    came: int = 0
    pieces: list[bytes] = field(default_factory=list)
    small: bytearray = field(default_factory=bytearray)

    def add(self, data: bytes) -> None:
        self.came += len(data)
        if len(data) >= _PIECE_BYTES and not self.small:
            self.pieces.append(data)
            return
        self.small += data
        if len(self.small) >= _PIECE_BYTES or self.came == self.total:
            self.pieces.append(bytes(self.small))
            self.small.clear()


class Uploads:
    """One conversation's uploads. The memory is taken as the chunks come, not when announced."""

    def __init__(self, budget: MediaBudget, max_item_bytes: int) -> None:
        """Count the bytes in ``budget``, as all media of the conversation."""
        self._budget = budget
        self._hold: Hold | None = None
        self._max_item_bytes = max_item_bytes
        self._open: dict[str, _Upload] = {}
        self._incomplete = 0
        self._due_s = 0.0  # on the clock of `time.monotonic`

    @property
    def hold(self) -> Hold:
        """What the conversation's media hold of the memory; most conversations have none."""
        if self._hold is None:
            self._hold = Hold(self._budget)
        return self._hold

    def add(self, upload_id: str, data: bytes, total: int) -> None:
        """Take in a chunk; ``total`` is the file's size in the first one.

        Raises:
            InvalidRequestError: the chunk breaks the rules of `MediaChunk`.
            OverloadedError: the process has no memory for it.
        """
        upload = self._open.get(upload_id) or self._begin(upload_id, total)
        if not data:
            raise InvalidRequestError.of("media_chunk.data", "must not be empty")
        if upload.came + len(data) > upload.total:
            raise InvalidRequestError.of(
                "media_chunk.data",
                f"{upload.came + len(data)} bytes have come of an upload that announced "
                f"{upload.total}",
            )
        self.hold.take(len(data))
        upload.add(data)
        self._due_s += len(data) / MIN_BYTES_PER_S
        if upload.came == upload.total:
            self._incomplete -= 1

    @property
    def left_s(self) -> float | None:
        """How long the next chunk may take; None: no file is incomplete."""
        return max(0.0, self._due_s - time.monotonic()) if self._incomplete else None

    def too_slow(self) -> UnavailableError:
        missing = sum(upload.total - upload.came for upload in self._open.values())
        return UnavailableError(
            f"{missing} bytes of uploads are missing, and the client sends less than "
            f"{MIN_BYTES_PER_S} a second, the least allowed; send them again, faster"
        )

    def _begin(self, upload_id: str, total: int) -> _Upload:
        if not 1 <= len(upload_id.encode()) <= _MAX_ID_BYTES:
            raise InvalidRequestError.of(
                "media_chunk.upload_id", f"must have 1 to {_MAX_ID_BYTES} bytes"
            )
        if len(self._open) >= MAX_UPLOADS:
            raise InvalidRequestError.of(
                "media_chunk.upload_id",
                f"{MAX_UPLOADS} uploads wait already; send the message that names them",
            )
        if not 1 <= total <= self._max_item_bytes:
            raise InvalidRequestError.of(
                "media_chunk.total_bytes",
                f"must be from 1 to {self._max_item_bytes} in an upload's first chunk, not {total}",
            )
        if not self._incomplete:
            self._due_s = time.monotonic() + IDLE_S
        self._incomplete += 1
        upload = self._open[upload_id] = _Upload(total)
        return upload

    def close(self) -> None:
        """Forget all, now: who still knows this object may live until the next collection."""
        for upload in self._open.values():
            upload.pieces.clear()
            upload.small.clear()
        self._open.clear()
        self._incomplete = 0
        if self._hold is not None:
            self._hold.close()

    def take(self, upload_id: str, path: str) -> list[bytes]:
        """Return a complete upload's pieces and forget it; ``path`` is the field that names it.

        Raises:
            InvalidRequestError: it is unknown or not complete.
        """
        upload = self._open.get(upload_id)
        if upload is None:
            raise InvalidRequestError.of(
                path, "names no upload of this stream; send its media_chunk messages before"
            )
        if upload.came < upload.total:
            raise InvalidRequestError.of(
                path, f"only {upload.came} of its {upload.total} bytes have come"
            )
        del self._open[upload_id]
        return upload.pieces
