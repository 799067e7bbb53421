"""What one RPC's caller has sent and its handler hasn't read, counted in the bound of all."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from millstream_server.runtime.errors import Failure
from millstream_server.runtime.transport.framing import MessageReader

if TYPE_CHECKING:
    from millstream_server.runtime.transport.connection import Connection

_NOT_COUNTED_BYTES = 1024
"""Single small requests aren't worth it."""
_MESSAGE_BYTES = 64
"""What a message takes beside its bytes: 64 KiB may hold 9,000 messages of 2 bytes."""


class Inbox:
    """Messages that wait for the handler, and the one that isn't complete."""

    __slots__ = ("_connection", "_counted", "_message_bytes", "_messages", "_reader")

    def __init__(self, connection: Connection, reader: MessageReader) -> None:
        """Count for ``connection`` what ``reader`` makes of its bytes."""
        self._connection = connection
        self._reader = reader
        self._messages: deque[bytes | Failure] = deque()
        self._message_bytes = 0
        self._counted = 0
        """How much of it is counted in the bound of all."""

    def __bool__(self) -> bool:
        """Whether something waits for the handler."""
        return bool(self._messages)

    @property
    def held_bytes(self) -> int:
        """Bytes that it takes."""
        overhead = _MESSAGE_BYTES * len(self._messages)
        return self._message_bytes + overhead + self._reader.buffered

    @property
    def missing(self) -> int:
        """Bytes that the message begun still lacks; 0 where that isn't known."""
        return self._reader.missing

    def feed(self, data: bytes) -> int:
        """Take bytes; return how many messages they complete. Call `count` when that is settled.

        Raises:
            ServingError: a message is too large or can't be unpacked.
            StatusError: likewise.
        """
        messages = self._reader.feed(data)
        self._messages += messages
        self._message_bytes += sum(map(len, messages))
        return len(messages)

    def end(self, error: Failure) -> None:
        """Note that no more comes; ``error`` is read last if a message is incomplete."""
        if self._reader.incomplete:
            self._messages.append(error)

    def take(self) -> bytes:
        """Return the next message.

        Raises:
            ServingError: the caller's side ended in the middle of a message.
        """
        message = self._messages.popleft()
        if not isinstance(message, bytes):
            raise message
        self._message_bytes -= len(message)
        self.count()
        return message

    def drop(self) -> None:
        """Forget what is there; nothing may be fed afterwards."""
        self._messages.clear()
        self._message_bytes = 0
        self._reader.drop()
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
