"""gRPC's messages in a stream of bytes: a flag, a length of four bytes, the message."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable

from millstream_server.runtime.errors import (
    Code,
    MalformedMessageError,
    StatusError,
)

_PREFIX = struct.Struct(">BI")
PREFIX_BYTES = _PREFIX.size
prefix: Callable[[int, int], bytes] = _PREFIX.pack
"""Makes a message's prefix of its flag (1: compressed) and its length."""
_WINDOW_BITS = {b"gzip": 31, b"deflate": 15}


class MessageReader:
    """Puts the messages of one RPC together."""

    __slots__ = ("_buffer", "_compressed", "_encoding", "_missing", "_most")

    def __init__(self, encoding: bytes, max_bytes: int) -> None:
        """Read messages of up to ``max_bytes``, unpacked, compressed by ``encoding``."""
        self._encoding = encoding
        self._most = max_bytes
        self._buffer = bytearray()
        self._missing = -1
        """Bytes that the message in the buffer still lacks; -1: its prefix isn't complete."""
        self._compressed = 0

    @property
    def buffered(self) -> int:
        """Bytes of a message that isn't complete."""
        return len(self._buffer)

    @property
    def missing(self) -> int:
        """Bytes that the message begun still lacks; 0 where that isn't known."""
        return max(self._missing, 0)

    @property
    def incomplete(self) -> bool:
        """Whether a message has begun and isn't complete."""
        return bool(self._buffer) or self._missing >= 0

    def drop(self) -> None:
        """Forget what is buffered; nothing may be fed afterwards."""
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Take bytes; return the messages that they complete.

        Raises:
            ServingError: a message is too large or can't be unpacked.
            StatusError: likewise.
        """
        messages: list[bytes] = []
        at, end = 0, len(data)
        while at < end:
            if self._missing < 0:
                at = self._read_prefix(data, at)
                if self._missing < 0:
                    break
                if self._missing:
                    continue
            if not self._buffer and end - at >= self._missing:  # the usual case: no copy more
                message = data[at : at + self._missing]
                at += self._missing
            else:
                taken = data[at : at + self._missing]
                self._buffer += taken
                at += len(taken)
                self._missing -= len(taken)
                if self._missing:
                    break
                message = bytes(self._buffer)
                self._buffer.clear()
            self._missing = -1
            messages.append(self._unpacked(message) if self._compressed else message)
        return messages

    def _read_prefix(self, data: bytes, at: int) -> int:
        """Read a prefix, or what there is of it; return where the message begins."""
        if not self._buffer and len(data) - at >= PREFIX_BYTES:
            head = data[at : at + PREFIX_BYTES]
            at += PREFIX_BYTES
        else:
            taken = data[at : at + PREFIX_BYTES - len(self._buffer)]
            self._buffer += taken
            at += len(taken)
            if len(self._buffer) < PREFIX_BYTES:
                return at
            head = bytes(self._buffer)
            self._buffer.clear()
        self._compressed, nbytes = _PREFIX.unpack(head)
        if nbytes > self._most:
            raise too_large(f"a message of {nbytes} bytes", self._most)
        if self._compressed and (self._compressed > 1 or self._encoding not in _WINDOW_BITS):
            raise StatusError(  # the code that gRPC's compression.md asks for
                Code.INTERNAL,
                f"a message has the compressed flag {self._compressed}, "
                f"and the headers the grpc-encoding {self._encoding.decode(errors='replace')}",
            )
        self._missing = nbytes
        return at

    def _unpacked(self, message: bytes) -> bytes:
        unpacker = zlib.decompressobj(_WINDOW_BITS[self._encoding])
        try:
            found = unpacker.decompress(message, self._most + 1)
        except zlib.error:
            raise MalformedMessageError("a compressed message can't be unpacked") from None
        if len(found) > self._most:
            raise too_large("a compressed message", self._most)
        if not unpacker.eof:
            raise MalformedMessageError("a compressed message is cut short")
        if unpacker.unused_data:
            raise MalformedMessageError("a compressed message has more behind its end")
        return found


def is_known_encoding(encoding: bytes) -> bool:
    """Return whether messages compressed like this can be read."""
    return encoding == b"identity" or encoding in _WINDOW_BITS


def too_large(what: str, most: int) -> StatusError:
    """Make the error of a message above the limit."""
    return StatusError(
        Code.RESOURCE_EXHAUSTED,
        f"{what} is larger than max, the {most} bytes that this server takes; send less at once",
    )
