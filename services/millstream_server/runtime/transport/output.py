"""What RPCs send on a connection: one write per loop turn, within the windows' and socket's room.

A `Sender` is one RPC's, the `Outbox` is the connection's.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from struct import Struct
from typing import TYPE_CHECKING, Any

from h2.errors import ErrorCodes

from millstream_server.runtime.rpc.call import Source
from millstream_server.runtime.rpc.served_call import CallOverError
from millstream_server.runtime.transport.frame_reader import HEAD
from millstream_server.runtime.transport.headers import RESPONSE, Header

if TYPE_CHECKING:
    from millstream_server.runtime.transport.connection import Connection
    from millstream_server.runtime.transport.h2_state import ServerState

Serialize = Callable[[Any], bytes]

_FULL_BYTES = 256 << 10
"""Responses wait when so much is to be written in one loop turn."""
_MOST_UNWRITTEN_BYTES = 2 << 20
"""A caller that reads nothing while it makes us send more (acks, statuses) loses its connection."""
PREFIX = Struct(">BI")
"""In front of a message: a flag (1: compressed) and its length."""
_DATA = Struct(">HBBBIBI").pack
"""A DATA frame's head with a message's prefix: length (24 bits), type 0, flags 0, stream; flag 0,
length."""
_FRAME = HEAD.pack
_NOTHING = memoryview(b"")
_MOST_FRAME_BYTES = 64 << 10
"""Callers may allow frames of 16 MiB: one of those would fill the socket's buffer alone."""


class NoWindow:
    """Stands for HTTP/2's windows on HTTP/1.1, which has the socket's alone."""

    outbound_flow_control_window = 1 << 40

    def can_send(self, _stream_id: int) -> bool:
        """Return False: there is no credit to give."""
        return False


class Outbox:
    """Frames to send, and streams whose responses wait for room."""

    __slots__ = ("_bytes", "_frames", "_h2", "_loop", "_paused", "_ready", "_scheduled", "_socket",
                 "_waiting")  # fmt: skip

    _h2: ServerState | NoWindow
    _socket: Any

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """Send what connection and streams have; `open` comes first."""
        self._loop = loop
        self._frames: list[bytes] = []
        self._bytes = 0
        self._scheduled = False
        self._paused = False
        """The socket's buffer is full."""
        self._ready: list[Sender] = []
        """Those whose sources have messages: asked when frames are written, once per loop turn."""
        self._waiting: deque[Sender] | tuple[()] = ()
        """Those that have something to send, and room. Mostly none waits: no deque is made then."""

    def open(self, transport: Any, h2: ServerState | NoWindow) -> None:
        """Write to ``transport`` within the connection's window, which ``h2`` keeps."""
        self._socket, self._h2 = transport, h2

    @property
    def blocked(self) -> bool:
        """Whether responses must wait: the socket is full, or others wait already."""
        return self._paused or bool(self._waiting) or self._bytes > _FULL_BYTES

    def send(self, frame: bytes) -> None:
        self._frames.append(frame)
        self._bytes += len(frame)
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self.flush)

    def ask(self, sender: Sender) -> None:
        """Ask a stream's source for its message when frames are written."""
        self._ready.append(sender)
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self.flush)

    def flush(self) -> None:
        self._scheduled = True  # by this call itself
        if self._ready:
            ready, self._ready = self._ready, []
            for sender in ready:
                if self.blocked:
                    sender.wait()
                else:
                    sender.pull()
        self._scheduled = bool(self._ready)
        if self._scheduled:  # more parts of a large response: in the next turn, after others'
            self._loop.call_soon(self.flush)
        frames, self._frames, self._bytes = self._frames, [], 0
        if not frames or self._socket.is_closing():
            return
        self._socket.write(frames[0] if len(frames) == 1 else b"".join(frames))
        if self._paused and self._socket.get_write_buffer_size() > _MOST_UNWRITTEN_BYTES:
            self._socket.abort()
        elif self._waiting:
            self.pump()

    def pause(self) -> None:
        self._paused = True

    def resume(self) -> None:
        self._paused = False
        self.pump()

    def enqueue(self, sender: Sender) -> None:
        """Send a stream's `unsent` when the windows and the socket allow."""
        if not sender.queued:
            sender.queued = True
            if isinstance(self._waiting, tuple):
                self._waiting = deque()
            self._waiting.append(sender)
            self.pump()

    def pump(self) -> None:
        """Send parts of what waits, a frame of each stream in turn."""
        waiting = self._waiting
        while waiting and not self._paused and self._bytes <= _FULL_BYTES:
            if self._h2.outbound_flow_control_window <= 0:
                return
            sender = waiting.popleft()
            if sender.send_part():
                waiting.append(sender)
            else:
                sender.queued = False

    def close(self) -> None:
        if self._waiting:
            self._waiting.clear()
        self._ready.clear()


class Sender:
    """Sends responses, one at a time: at once, or in parts as the caller makes room."""

    __slots__ = ("_begun", "_connection", "_counted", "_id", "_over", "_sent", "_serialize",
                 "_source", "_window", "asked", "queued", "unsent")  # fmt: skip

    def __init__(
        self, connection: Connection, window: Any, stream_id: int, serialize: Serialize
    ) -> None:
        """Send on a stream that is open; ``serialize`` makes bytes of messages.

        ``window`` is h2's stream, which keeps the window of what may be sent.
        """
        self._connection = connection
        self._id = stream_id
        self._serialize = serialize
        self._window = window
        self._begun = self._over = self.queued = False
        """Headers were sent; the RPC has ended; it is in the queue of those that can send."""
        self.asked = False
        """Its source has a message, or may have one."""
        self._source: Source | None = None
        self._counted = 0
        """Of the bound of all unsent bytes."""
        self._sent: asyncio.Future[None] | None = None
        """Set when the response, or all that the source has, is sent."""
        self.unsent = _NOTHING
        """The rest of a response that waits for the windows."""

    def send_whole(self, data: bytes) -> bool:
        """Send a message as one frame; return False if the windows or the socket lack room."""
        nbytes = len(data) + PREFIX.size
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
        connection.strikes = 0
        head = _DATA(nbytes >> 8, nbytes & 0xFF, 0, 0, self._id, 0, nbytes - PREFIX.size)
        connection.out.send(head + data)
        return True

    async def write(self, response: Any) -> None:
        data = self._serialize(response)
        if self._over:
            raise CallOverError
        if self.send_whole(data):
            return
        self._sent = self._connection.loop.create_future()
        self._hold(data)
        await self._all_sent(self._sent)
        if self._over:
            raise CallOverError

    async def _all_sent(self, sent: asyncio.Future[None]) -> None:
        try:
            await sent
        finally:
            self._sent = None
            self.drop()

    def close(self) -> None:
        self._over = True
        self.drop()

    def _hold(self, data: bytes) -> None:
        if not self._begun:
            self._send_headers()
        self.unsent = memoryview(self._framed(data))
        self._counted = len(data)
        self._connection.bounds.unsent.add(self._connection, len(data))
        self._connection.out.enqueue(self)

    def _framed(self, data: bytes) -> bytes:
        return PREFIX.pack(0, len(data)) + data

    def drop(self) -> None:
        """Forget what waits: at once, since who looks for bytes to free counts on it."""
        self.unsent, self._source = _NOTHING, None
        self._uncount()

    def _uncount(self) -> None:
        counted, self._counted = self._counted, 0
        if counted:
            self._connection.bounds.unsent.remove(self._connection, counted)

    def window_grew(self) -> None:
        if self.unsent or self.asked:
            self._connection.out.enqueue(self)

    def send_part(self) -> bool:
        """Send a frame of `unsent`; return whether there is more that the stream's window allows.

        The connection calls it when its own window and the socket have room.
        """
        if not self.unsent:
            self.pull()
        rest, window, room = self.unsent, self._window, self._room
        if not rest or room <= 0:
            return False
        self._send_frame(rest[:room])
        self.unsent = rest[room:]
        if self.unsent:
            return bool(window.outbound_flow_control_window > 0)
        self._uncount()
        if self._source is None or self._source.over:
            self._end(None)
            return False
        return bool(self.asked and window.outbound_flow_control_window > 0)

    @property
    def _room(self) -> int:
        """Bytes that a frame may have now, by the windows."""
        h2 = self._connection.h2
        room: int = min(
            self._window.outbound_flow_control_window,
            h2.outbound_flow_control_window,
            h2.max_outbound_frame_size,
            _MOST_FRAME_BYTES,
        )
        return room

    def _send_frame(self, data: bytes | memoryview) -> None:
        """Send a DATA frame for which there is room."""
        nbytes, connection = len(data), self._connection
        self._window.outbound_flow_control_window -= nbytes
        connection.h2.outbound_flow_control_window -= nbytes
        connection.strikes = 0
        head = _FRAME(nbytes >> 8, nbytes & 0xFF, 0, 0, self._id)
        connection.out.send(head + data)

    def ready(self) -> None:
        if not self.asked:
            self.asked = True
            if self._source is not None and not self.unsent:
                self._connection.out.ask(self)

    async def send_from(self, source: Source) -> None:
        if self._over:
            raise CallOverError
        self._source = source
        self._sent = self._connection.loop.create_future()
        if self.asked:
            self._connection.out.ask(self)
        await self._all_sent(self._sent)

    def wait(self) -> None:
        """Ask the source later: the connection has no room."""
        if self._source is not None:
            self._source.gathers = True
            self._connection.out.enqueue(self)

    def pull(self) -> None:
        """Send the source's next message, if the windows have room, else as much as they allow."""
        source = self._source
        if source is None or not self.asked or self.unsent:
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
        elif source.over:
            self._end(None)

    def _end(self, error: Exception | None) -> None:
        self._source = None
        if self._sent is None or self._sent.done():
            return
        if error is None:
            self._sent.set_result(None)
        else:
            self._sent.set_exception(error)

    def reset(self) -> None:
        """End the stream without a status, after a bug."""
        self._connection.h2.reset(self._id, ErrorCodes.INTERNAL_ERROR)

    def send_trailers(self, trailers: Sequence[Header]) -> None:
        """End the stream, with the response's headers in front if they haven't been sent."""
        self._send_headers(trailers if self._begun else [*RESPONSE[:2], *trailers], end=True)

    def _send_headers(
        self,
        headers: Sequence[Header] = RESPONSE,
        once: Sequence[Header] = (),
        *,
        end: bool = False,
    ) -> None:
        """Send headers or, with ``end``, trailers; then the stream is over on both sides.

        ``once``: see `ServerState.respond`.
        """
        self._begun = True
        connection, h2 = self._connection, self._connection.h2
        if not h2.can_send(self._id):
            return  # `Stream.lost` comes with the next event
        connection.strikes = 0
        h2.respond(self._id, headers, once, end_stream=end)
        if end:
            h2.ask_for_no_more(self._id)
