"""What one connection sends: one write per loop turn, within the windows and the socket's room."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any

from millstream_server.runtime.transport.h2_state import ServerState

if TYPE_CHECKING:
    from millstream_server.runtime.transport.sender import Sender

_FULL_BYTES = 256 << 10
"""Responses wait when so much is to be written in one loop turn."""
_MOST_UNWRITTEN_BYTES = 2 << 20
"""A caller that reads nothing while it makes us send more (acks, statuses) loses its connection."""


class Outbox:
    """Frames to send, and streams whose responses wait for room."""

    __slots__ = (
        "_bytes",
        "_frames",
        "_h2",
        "_loop",
        "_paused",
        "_ready",
        "_scheduled",
        "_socket",
        "_waiting",
    )

    def __init__(self, h2: ServerState, loop: asyncio.AbstractEventLoop) -> None:
        """Send what ``h2`` and the streams have; `open` comes first."""
        self._h2 = h2
        self._loop = loop
        self._socket: Any = None
        self._frames: list[bytes] = []
        self._bytes = 0
        self._scheduled = False
        self._paused = False
        """The socket's buffer is full."""
        self._ready: list[Sender] = []
        """Those whose sources have messages: asked when frames are written, once per loop turn."""
        self._waiting: deque[Sender] = deque()
        """Those that have something to send and whose own windows have room."""

    def open(self, transport: Any) -> None:
        """Write to ``transport``."""
        self._socket = transport

    @property
    def blocked(self) -> bool:
        """Whether responses must wait: the socket is full, or others wait already."""
        return self._paused or bool(self._waiting) or self._bytes > _FULL_BYTES

    def send(self, frame: bytes) -> None:
        """Write a frame with the others of this loop turn."""
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

    def collect(self) -> None:
        """Write what h2 wants to send."""
        data = self._h2.data_to_send()
        if data:
            self.send(data)

    def flush(self) -> None:
        """Write now."""
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
        """Note that the socket's buffer is full."""
        self._paused = True

    def resume(self) -> None:
        """Note that it has room."""
        self._paused = False
        self.pump()

    def enqueue(self, sender: Sender) -> None:
        """Send a stream's `unsent` when the windows and the socket allow."""
        if not sender.queued:
            sender.queued = True
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
        """Forget what waits."""
        self._waiting.clear()
        self._ready.clear()
