"""What one RPC sends: headers, responses within the windows, trailers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from struct import Struct

from millstream_server.runtime.transport.carrier import Carrier
from millstream_server.runtime.transport.headers import RESPONSE, Header
from millstream_server.runtime.transport.inbox import PREFIX_BYTES, prefix

_DATA = Struct(">HBBBIBI").pack
"""A DATA frame's head with a message's prefix: length (24 bits), type 0, flags 0, stream; flag 0,
length."""
_MOST_FRAME_BYTES = 64 << 10
"""Callers may allow frames of 16 MiB: one of those would fill the socket's buffer alone."""


class Sender:
    """Sends a response at once, or in parts as the caller makes room. One response at a time."""

    __slots__ = ("_begun", "_connection", "_counted", "_id", "_sent", "_window", "queued", "unsent")

    def __init__(self, connection: Carrier, stream_id: int) -> None:
        """Send on a stream that is open."""
        self._connection = connection
        self._id = stream_id
        self._window = connection.h2.streams[stream_id]
        """h2's stream, which keeps the window of what may be sent."""
        self._begun = self.queued = False
        """Headers were sent; and it is in the connection's queue of those that can send."""
        self._counted = 0
        """Of the bound of all unsent bytes."""
        self._sent: asyncio.Future[None] | None = None
        self.unsent: memoryview | None = None
        """The rest of a response that waits for the windows."""

    @property
    def unsent_bytes(self) -> int:
        """Bytes of a response that waits."""
        return 0 if self.unsent is None else len(self.unsent)

    def send_whole(self, data: bytes) -> bool:
        """Send a message as one frame; return False if the windows or the socket lack room."""
        nbytes = len(data) + PREFIX_BYTES
        connection, h2, window = self._connection, self._connection.h2, self._window
        if (
            connection.out.blocked
            or nbytes > window.outbound_flow_control_window
            or nbytes > h2.outbound_flow_control_window
            or nbytes > h2.max_outbound_frame_size
            or nbytes > _MOST_FRAME_BYTES
        ):
            return False
        if not self._begun:
            self._send_headers()
        window.outbound_flow_control_window -= nbytes
        h2.outbound_flow_control_window -= nbytes
        connection.keepalive.strikes = 0
        head = _DATA(nbytes >> 8, nbytes & 0xFF, 0, 0, self._id, 0, nbytes - PREFIX_BYTES)
        connection.out.send(head + data)
        return True

    async def send_parts(self, data: bytes) -> None:
        """Send a message as room comes; wait until all of it is sent."""
        if not self._begun:
            self._send_headers()
        self.unsent = memoryview(prefix(0, len(data)) + data)
        self._sent = self._connection.loop.create_future()
        self._counted = len(data)
        self._connection.bounds.unsent.add(self._connection, len(data))
        self._connection.out.enqueue(self)
        try:
            await self._sent
        finally:
            self._sent = None
            self.drop()

    def drop(self) -> None:
        """Forget what waits: at once, since who looks for bytes to free counts on it."""
        self.unsent = None
        counted, self._counted = self._counted, 0
        if counted:
            self._connection.bounds.unsent.remove(self._connection, counted)

    def window_grew(self) -> None:
        """Send more of what waits."""
        if self.unsent is not None:
            self._connection.out.enqueue(self)

    def send_part(self) -> bool:
        """Send a frame of `unsent`; return whether there is more that the stream's window allows.

        The connection calls it when its own window and the socket have room.
        """
        window, h2 = self._window, self._connection.h2
        rest = self.unsent
        if rest is None:
            return False
        nbytes = min(
            len(rest),
            window.outbound_flow_control_window,
            h2.outbound_flow_control_window,
            h2.max_outbound_frame_size,
            _MOST_FRAME_BYTES,
        )
        if nbytes <= 0:
            return False
        window.outbound_flow_control_window -= nbytes
        h2.outbound_flow_control_window -= nbytes
        self._connection.keepalive.strikes = 0
        head = nbytes.to_bytes(3, "big") + b"\0\0" + self._id.to_bytes(4, "big")
        self._connection.out.send(head + rest[:nbytes])
        self.unsent = rest[nbytes:]
        if self.unsent:
            return window.outbound_flow_control_window > 0
        self.unsent = None
        if self._sent is not None and not self._sent.done():
            self._sent.set_result(None)
        return False

    def send_trailers(self, trailers: Sequence[Header]) -> None:
        """End the stream, with the response's headers in front if they haven't been sent."""
        headers = trailers if self._begun else [*RESPONSE[:2], *trailers]
        self._connection.send_headers(self._id, headers, end=True)

    def _send_headers(self) -> None:
        self._begun = True
        self._connection.send_headers(self._id, RESPONSE, end=False)
