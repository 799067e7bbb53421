"""What one RPC sends: headers, responses within the windows, trailers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from struct import Struct
from typing import Any

from millstream_server.runtime.rpc.call import Source
from millstream_server.runtime.transport.carrier import Carrier
from millstream_server.runtime.transport.headers import RESPONSE, Header
from millstream_server.runtime.transport.inbox import PREFIX_BYTES, prefix

_DATA = Struct(">HBBBIBI").pack
"""A DATA frame's head with a message's prefix: length (24 bits), type 0, flags 0, stream; flag 0,
length."""
_MOST_FRAME_BYTES = 64 << 10
"""Callers may allow frames of 16 MiB: one of those would fill the socket's buffer alone."""


class Sender:
    """Sends responses, one at a time: at once, or in parts as the caller makes room."""

    __slots__ = ("_begun", "_connection", "_counted", "_id", "_sent", "_serialize", "_source",
                 "_window", "asked", "queued", "unsent")  # fmt: skip

    def __init__(
        self, connection: Carrier, stream_id: int, serialize: Callable[[Any], bytes]
    ) -> None:
        """Send on a stream that is open; ``serialize`` makes bytes of a source's messages."""
        self._connection = connection
        self._id = stream_id
        self._serialize = serialize
        self._window = connection.h2.streams[stream_id]
        """h2's stream, which keeps the window of what may be sent."""
        self._begun = self.queued = False
        """Headers were sent; and it is in the connection's queue of those that can send."""
        self.asked = False
        """Its source has a message, or may have one."""
        self._source: Source | None = None
        self._counted = 0
        """Of the bound of all unsent bytes."""
        self._sent: asyncio.Future[None] | None = None
        """Set when the response, or all that the source has, is sent."""
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
        self._sent = self._connection.loop.create_future()
        self._hold(data)
        self._connection.out.enqueue(self)
        try:
            await self._sent
        finally:
            self._sent = None
            self.drop()

    def _hold(self, data: bytes) -> None:
        if not self._begun:
            self._send_headers()
        self.unsent = memoryview(prefix(0, len(data)) + data)
        self._counted = len(data)
        self._connection.bounds.unsent.add(self._connection, len(data))

    def drop(self) -> None:
        """Forget what waits: at once, since who looks for bytes to free counts on it."""
        self.unsent = self._source = None
        self._uncount()

    def _uncount(self) -> None:
        counted, self._counted = self._counted, 0
        if counted:
            self._connection.bounds.unsent.remove(self._connection, counted)

    def window_grew(self) -> None:
        """Send more of what waits."""
        if self.unsent is not None or self.asked:
            self._connection.out.enqueue(self)

    def send_part(self) -> bool:
        """Send a frame of `unsent`; return whether there is more that the stream's window allows.

        The connection calls it when its own window and the socket have room.
        """
        if self.unsent is None:
            self.pull()
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
        self._uncount()
        if self._source is None or self._source.over:
            self._end(None)
            return False
        return self.asked and window.outbound_flow_control_window > 0

    # ---- a source --------------------------------------------------------------------------------

    def ready(self) -> None:
        """See `Call.ready`."""
        if not self.asked:
            self.asked = True
            if self._source is not None and self.unsent is None:
                self._connection.out.ask(self)

    async def send_from(self, source: Source) -> None:
        """See `Call.send_from`."""
        self._source = source
        self._sent = self._connection.loop.create_future()
        if self.asked:
            self._connection.out.ask(self)
        try:
            await self._sent
        finally:
            self._sent = None
            self.drop()

    def wait(self) -> None:
        """Ask the source later: the connection has no room."""
        if self._source is not None:
            self._source.gathers = True
            self._connection.out.enqueue(self)

    def pull(self) -> None:
        """Send the source's next message, if the windows have room, else as much as they allow."""
        source = self._source
        if source is None or not self.asked or self.unsent is not None:
            return  # `send_part` asks again when the last message is sent
        if self._window.outbound_flow_control_window <= 0:
            source.gathers = True  # it goes on with `window_grew`
            return
        self.asked = False
        try:
            message = source.next()
            if message is None:
                return
            data = self._serialize(message)
        except Exception as error:  # noqa: BLE001 - one call's failure must not end the others
            self._end(error)
            return
        if not self.send_whole(data):
            source.gathers = True
            self._hold(data)
            self._connection.out.enqueue(self)
        elif source.over:
            self._end(None)

    def _end(self, error: Exception | None) -> None:
        """Let go on who waits until all is sent."""
        self._source = None
        if self._sent is None or self._sent.done():
            return
        if error is None:
            self._sent.set_result(None)
        else:
            self._sent.set_exception(error)

    # ---- the end ---------------------------------------------------------------------------------

    def send_trailers(self, trailers: Sequence[Header]) -> None:
        """End the stream, with the response's headers in front if they haven't been sent."""
        headers = trailers if self._begun else [*RESPONSE[:2], *trailers]
        self._connection.send_headers(self._id, headers, end=True)

    def _send_headers(self) -> None:
        self._begun = True
        self._connection.send_headers(self._id, RESPONSE, end=False)
