"""What connections of HTTP/1.1 and of HTTP/2 have in common: a socket, a peer, silent streams."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from millstream_server.runtime.rpc.call import CertificateName, key_of_address
from millstream_server.runtime.rpc.ledger import Place
from millstream_server.runtime.rpc.serving import no_first_message
from millstream_server.runtime.transport.output import Outbox
from millstream_server.runtime.transport.sockets import certificate_names, peer_name
from millstream_server.runtime.transport.stream import Stream

if TYPE_CHECKING:
    from millstream_server.runtime.transport.server import H2Server


class BaseConnection(asyncio.Protocol):
    """A connection with its streams. All calls come from the event loop's thread."""

    def __init__(self, server: H2Server, place: Place) -> None:
        """Serve requests of ``server``; ``place`` is given back at the end."""
        self.server = server
        self.options = server.options
        self.bounds = server.bounds
        self.loop = asyncio.get_running_loop()
        self.out = Outbox(self.loop)
        self.streams: dict[int, Stream] = {}
        """Open ones by their ids."""
        self.silent: dict[int, Stream] = {}
        """Those whose first message has not come, the oldest first."""
        self.brings_messages = False
        """The last that was heard of its streams is a message, not that one ended without."""
        self.peer = self.caller_key = ""
        self.certificate_names: Sequence[CertificateName] | None = None
        self.work_begun_s = 0.0
        """About what requests will take whose messages have come in this slice."""
        self.stuck_bytes = 0
        """In the socket's buffer while it is full."""
        self._place = place
        self._transport: Any = None
        self._ended = False

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self.peer = peer_name(transport.get_extra_info("peername"))
        self.caller_key = key_of_address(self.peer)
        self.certificate_names = certificate_names(transport)

    def pause_writing(self) -> None:
        """Note that the socket's buffer is full: it counts as unsent, like responses that wait."""
        self.out.pause()
        self.stuck_bytes = self._transport.get_write_buffer_size()
        self.bounds.unsent.add(self, self.stuck_bytes)

    def resume_writing(self) -> None:
        self._unstuck()
        self.out.resume()

    def _unstuck(self) -> None:
        stuck, self.stuck_bytes = self.stuck_bytes, 0
        self.bounds.unsent.remove(self, stuck)

    # ---- for streams

    def awaits_message(self, stream_id: int) -> None:
        self.silent[stream_id] = self.streams[stream_id]
        self.bounds.silent.add(self)

    def heard(self, stream_id: int, *, message: bool) -> None:
        """Note that a stream's first message has come; not ``message``: it has ended without."""
        self.brings_messages = message
        if self.silent.pop(stream_id, None) is not None:
            self.bounds.silent.remove(self)

    def _goes_last(self) -> bool:
        # One may be silent: its message is often among the bytes that wait.
        return len(self.silent) > 1 or not self.brings_messages

    def _end_silent(self, now_s: float) -> None:
        for stream in list(self.silent.values()):
            limit_s = stream.limit_s
            if limit_s is not None and now_s - stream.begun_s < limit_s:
                continue  # another method's limit may be shorter
            stream.fail(no_first_message(limit_s or 0.0))
