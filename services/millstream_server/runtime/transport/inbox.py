"""What one RPC's caller has sent: bytes to gRPC's messages, which wait for the handler.

A message has a flag (1: compressed) and a length of four bytes in front.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from millstream_server.runtime.errors import (
    Code,
    Failure,
    MalformedMessageError,
    StatusError,
)
from millstream_server.runtime.rpc.message_parts import UNCOUNTED_BYTES, check_parts
from millstream_server.runtime.rpc.served_call import CallOverError
from millstream_server.runtime.transport.h2_state import WINDOW_BYTES
from millstream_server.runtime.transport.output import PREFIX

if TYPE_CHECKING:
    from millstream_server.runtime.transport.connection import Connection

END: Any = object()
"""What `Inbox.read` returns after the last message."""
_WINDOW_BITS = {b"gzip": 31, b"deflate": 15}
ENCODINGS = tuple(name.decode() for name in _WINDOW_BITS)
"""How messages may be compressed."""
_NOT_COUNTED_BYTES = 1024
"""Single small requests aren't worth it."""
_MESSAGE_BYTES = 64
"""What a message takes beside its bytes: 64 KiB may hold 9,000 messages of 2 bytes."""


class Inbox:
    """Messages that wait for the handler, and the one begun; counted in the bound of all."""

    __slots__ = ("_buffer", "_compressed", "_connection", "_counted", "_encoding", "_id",
                 "_message_bytes", "_messages", "_missing", "_most", "_over", "_parse",
                 "_uncredited", "_woken", "begun", "descriptor", "ended")  # fmt: skip

    def __init__(
        self,
        connection: Connection,
        stream_id: int,
        encoding: bytes,
        max_bytes: int,
        parse: Callable[[bytes], Any],
    ) -> None:
        """Take messages of up to ``max_bytes``, unpacked, compressed by ``encode``."""
        self._connection = connection
        self._id = stream_id
        self._encoding = encoding
        self._most = max_bytes
        self._messages: list[bytes | Failure] = []  # a deque takes 700 bytes, empty
        self._message_bytes = 0
        self._counted = 0
        """How much of it is counted in the bound of all."""
        self._buffer = bytearray()
        """Of the message begun, or of its prefix."""
        self._missing = -1
        """Bytes that the message begun still lacks; -1: its prefix isn't complete."""
        self._compressed = 0
        self._uncredited = 0
        """Bytes received for which the caller got no credit yet."""
        self._parse = parse
        self.descriptor: Any = None
        """Of its messages, to count their parts; the stream sets it. None: they have none."""
        self._woken: asyncio.Future[None] | None = None
        self.begun = False
        """A message has come; the stream sets it."""
        self.ended = False
        """The caller has closed its side, or nothing after it is taken; the stream sets it."""
        self._over = False

    def __bool__(self) -> bool:
        return bool(self._messages)

    @property
    def silent(self) -> bool:
        """Whether nothing has come yet, not even the end."""
        return not (self.begun or self.ended)

    @property
    def held_bytes(self) -> int:
        return self._message_bytes + _MESSAGE_BYTES * len(self._messages) + len(self._buffer)

    def feed(self, data: bytes, nbytes: int) -> int:
        """Take bytes that used ``nbytes`` of the window; return how many messages they complete.

        Call `count` and `credit` when that is settled.

        Raises:
            ServingError: a message is too large or can't be unpacked.
            StatusError: likewise.
        """
        self._uncredited += nbytes
        completed, at, end = 0, 0, len(data)
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
            if self._compressed:
                message = unpacked(message, self._encoding, self._most)
            self._messages.append(message)
            self._message_bytes += len(message)
            completed += 1
        return completed

    def _read_prefix(self, data: bytes, at: int) -> int:
        if not self._buffer and len(data) - at >= PREFIX.size:
            head = data[at : at + PREFIX.size]
            at += PREFIX.size
        else:
            taken = data[at : at + PREFIX.size - len(self._buffer)]
            self._buffer += taken
            at += len(taken)
            if len(self._buffer) < PREFIX.size:
                return at
            head = bytes(self._buffer)
            self._buffer.clear()
        self._compressed, nbytes = PREFIX.unpack(head)
        if nbytes > self._most:
            raise _too_large(f"a message of {nbytes} bytes", self._most)
        if self._compressed and (self._compressed > 1 or self._encoding not in _WINDOW_BITS):
            raise MalformedMessageError(  # its code is what gRPC's compression.md asks for
                f"a message has the compressed flag {self._compressed}, "
                f"and the headers the grpc-encoding {self._encoding.decode(errors='replace')}",
            )
        self._missing = nbytes
        return at

    def end(self) -> None:
        """Note that no more comes: a message that is incomplete is read last, as an error."""
        if self._buffer or self._missing >= 0:
            self._messages.append(
                MalformedMessageError("the request ends in the middle of a message")
            )

    async def read(self) -> Any:
        """Return the next message, parsed; `END` after the last one.

        Raises:
            ServingError: the caller's side ended in the middle of a message.
            CallOverError: the RPC has ended.
        """
        while not self._messages:
            if self.ended:
                return END
            if self._over:
                raise CallOverError
            self._woken = self._connection.loop.create_future()
            await self._woken
        if self.descriptor is not None and self._message_bytes > UNCOUNTED_BYTES:
            await self._check_parts(self._messages[0])
        message = self._messages.pop(0)
        if not isinstance(message, bytes):
            raise message
        self._message_bytes -= len(message)
        self.count()
        if not self.ended:
            self.credit()
        return self._parse(message)

    async def _check_parts(self, message: bytes | Failure) -> None:
        """Count a long message's parts; it still counts as held meanwhile."""
        if isinstance(message, bytes) and len(message) > UNCOUNTED_BYTES:
            await check_parts(message, self.descriptor, self._connection.server.pool)
            if not self._messages:  # dropped
                raise CallOverError

    def wake(self) -> None:
        """Let the handler look again: a message has come, or the end."""
        if self._woken is not None and not self._woken.done():
            self._woken.set_result(None)

    def credit(self) -> None:
        """Let the caller send the rest of the message begun, or more if all was read."""
        if self._messages:
            return  # later, when the handler has read it
        if self._uncredited >= WINDOW_BYTES // 2 or self._missing > 0:
            credit, self._uncredited = self._uncredited, 0
            h2 = self._connection.h2
            if credit and h2.can_send(self._id):
                h2.increment_flow_control_window(credit, self._id)

    def close(self) -> None:
        self._over = True
        self.drop()

    def drop(self) -> None:
        """Forget what is there; nothing may be fed afterwards."""
        self._messages.clear()
        self._message_bytes = 0
        self._buffer = bytearray()
        if self._counted:
            self.count()

    def count(self) -> None:
        """Tell the bound of all how much is held; it may drop this in turn."""
        held = self.held_bytes
        if held <= _NOT_COUNTED_BYTES:
            held = 0
        if (more := held - self._counted) == 0:
            return
        self._counted = held
        received = self._connection.bounds.received
        if more > 0:
            received.add(self._connection, more)
        else:
            received.remove(self._connection, -more)


def is_known_encoding(encoding: bytes) -> bool:
    """Return whether messages compressed like this can be read."""
    return encoding == b"identity" or encoding in _WINDOW_BITS


def unpacked(message: bytes, encoding: bytes, most: int) -> bytes:
    """Unpack a message of up to ``most`` bytes.

    Raises:
        StatusError: it is no such message.
    """
    unpacker = zlib.decompressobj(_WINDOW_BITS[encoding])
    try:
        found = unpacker.decompress(message, most + 1)
    except zlib.error:
        raise MalformedMessageError("a compressed message can't be unpacked") from None
    if len(found) > most:
        raise _too_large("a compressed message", most)
    if not unpacker.eof:
        raise MalformedMessageError("a compressed message is cut short")
    if unpacker.unused_data:
        raise MalformedMessageError("a compressed message has more behind its end")
    return found


def _too_large(what: str, most: int) -> StatusError:
    return StatusError(
        Code.RESOURCE_EXHAUSTED,
        f"{what} is larger than max, the {most} bytes that this server takes; send less at once",
    )
