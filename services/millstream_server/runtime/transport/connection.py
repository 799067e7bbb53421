"""One connection: frames in become streams' events; frames out are one write per loop turn."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

from h2 import events
from h2.errors import ErrorCodes
from h2.exceptions import ProtocolError
from h2.settings import SettingCodes
from hyperframe.frame import GoAwayFrame

from millstream_server.runtime.rpc.caller_key import key_of_address
from millstream_server.runtime.rpc.serving import no_first_message
from millstream_server.runtime.security.certificate_names import CertificateName
from millstream_server.runtime.telemetry.log import get_log
from millstream_server.runtime.transport.fair_bound import Place
from millstream_server.runtime.transport.h2_state import (
    CONNECTION_WINDOW_BYTES,
    LAST_STREAM,
    ServerState,
)
from millstream_server.runtime.transport.headers import Header
from millstream_server.runtime.transport.intake import Intake
from millstream_server.runtime.transport.keepalive import Keepalive
from millstream_server.runtime.transport.outbox import Outbox
from millstream_server.runtime.transport.parts import ServerParts
from millstream_server.runtime.transport.peer import certificate_names, peer_name
from millstream_server.runtime.transport.rate_limit import RateLimit
from millstream_server.runtime.transport.requests import are_sound, open_stream
from millstream_server.runtime.transport.stream import Stream
from millstream_server.runtime.transport.work import Work

log = get_log(__name__)

_KEEPALIVE_PING, _DRAIN_PING = b"millping", b"milldrai"
_DRAIN_ACK_S = 10.0
"""Longest wait in a drain until the caller knows of it."""
_LINGER_S = 2.0
"""Longest wait until a caller has read the last bytes of a connection that ends."""


class Connection(asyncio.Protocol):
    """An HTTP/2 connection with its RPCs. All calls come from the event loop's thread."""

    def __init__(self, parts: ServerParts, place: Place) -> None:
        """Serve with a server's ``parts``; ``place`` is given back at the end."""
        self.parts = parts
        self.options = options = parts.options
        self.loop = asyncio.get_running_loop()
        self.h2 = ServerState(options)
        self.streams: dict[int, Stream] = {}
        """Open RPCs by their streams' ids."""
        self.peer = ""
        self.caller_key = ""
        self.certificate_names: Sequence[CertificateName] | None = None
        now_s = self.loop.time()
        self.keepalive = Keepalive(options, now_s)
        self.bounds = parts.bounds
        self.out = Outbox(self.h2, self.loop)
        self._resets = RateLimit(options.max_resets, options.resets_per_s, now_s)
        self.silent: dict[int, Stream] = {}
        """RPCs whose first message has not come, the oldest first."""
        work = Work(parts.bounds.work, now_s)
        self._intake = Intake(self.loop, work, self._handle, self._start, self._goes_last)
        self.speaks = False
        """The last that was heard of its RPCs is a message, not that one ended without."""
        age_s = options.max_connection_age_s * random.uniform(0.9, 1.1)  # noqa: S311 - to spread
        self._leaves_s = now_s + age_s if age_s else math.inf
        self._cut_s = self._refuses_s = math.inf
        self._place = place
        place.give_up = self._give_up
        self._transport: Any = None
        self._stuck_bytes = 0
        """In the socket's buffer while it is full."""
        self._begun: list[Stream] = []
        self._consumed = 0
        """Bytes received since the connection's window was last opened."""
        self._draining = False
        self._caller_leaves = False
        """The caller sent GOAWAY."""
        self._last_stream = LAST_STREAM
        self._ended = False

    # ---- the socket ------------------------------------------------------------------------------

    def connection_made(self, transport: Any) -> None:
        """Send the settings."""
        self._transport = transport
        self.out.open(transport)
        self._intake.open(transport)
        self.peer = peer_name(transport.get_extra_info("peername"))
        self.caller_key = key_of_address(self.peer)
        self.certificate_names = certificate_names(transport)
        self.h2.initiate_connection()
        self.h2.increment_flow_control_window(CONNECTION_WINDOW_BYTES - (64 << 10) + 1)
        self.parts.opened(self)
        self.out.collect()

    def data_received(self, data: bytes) -> None:
        """Take bytes."""
        self.keepalive.received(self.loop.time())
        self.bounds.taken_bytes += len(data)
        self._intake.take(data)

    def _handle(self, data: bytes) -> None:
        """Let h2 read bytes, and act on what it found."""
        try:
            for event in self.h2.receive_data(data):
                handle = _HANDLERS.get(event.__class__)
                if handle is not None:
                    handle(self, event)
        except ProtocolError as error:
            log.debug("HTTP/2 error", peer=self.peer, why=str(error))
            self.end()
        except Exception as error:  # noqa: BLE001 - a bug must end this connection only
            log.error("a connection failed", error=error, peer=self.peer)
            self.abort()

    def _start(self) -> int:
        """Start the RPCs that have begun; return their number.

        Only now: what was reset in the same bytes costs no task.
        """
        begun, self._begun = self._begun, []
        started = 0
        for stream in begun:
            if not stream.over:
                stream.start()
                started += 1
        self.out.collect()
        return started

    def pause_writing(self) -> None:
        """Note that the socket's buffer is full: it counts as unsent, like responses that wait."""
        self.out.pause()
        self._stuck_bytes = self._transport.get_write_buffer_size()
        self.bounds.unsent.add(self, self._stuck_bytes)

    def resume_writing(self) -> None:
        """Note that it has room."""
        self._unstuck()
        self.out.resume()

    def _unstuck(self) -> None:
        stuck, self._stuck_bytes = self._stuck_bytes, 0
        self.bounds.unsent.remove(self, stuck)

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel all RPCs."""
        self._ended = True
        for stream in list(self.streams.values()):
            stream.lost()
        self._unstuck()
        self.out.close()
        self._intake.stop()
        self.h2.release()
        self.parts.closed(self)
        self._place.free()

    def end(self) -> None:
        """Send what there is, then close; RPCs that are open are cancelled."""
        if self._ended:
            return
        self.out.collect()
        self._ended = True
        self._intake.stop()
        self.out.flush()
        for stream in list(self.streams.values()):
            stream.lost()
        self._transport.close()
        # A caller that doesn't read what is left would keep it open.
        self.loop.call_later(_LINGER_S, self._transport.abort)

    @property
    def is_stuck(self) -> bool:
        """Whether its caller reads nothing now."""
        return bool(self._stuck_bytes)

    def abort(self) -> None:
        """Close at once."""
        self._ended = True
        self._unstuck()
        self._intake.stop()
        self._transport.abort()

    # ---- for streams -----------------------------------------------------------------------------

    def send_headers(self, stream: Stream, headers: Sequence[Header], *, end: bool) -> None:
        """Send headers or, with ``end``, trailers; then the stream is over on both sides."""
        if not self.h2.can_send(stream.id):
            return  # `lost` comes with the next event
        self.keepalive.strikes = 0
        self.h2.send_headers(stream.id, headers, end_stream=end)
        if end:
            self.ask_for_no_more(stream.id)
        self.out.collect()

    def ask_for_no_more(self, stream_id: int) -> None:
        """Close a stream whose last frame was sent and whose caller hasn't closed it."""
        stream = self.h2.streams.get(stream_id)
        if stream is not None and not stream.closed:
            self.h2.reset_stream(stream_id, ErrorCodes.NO_ERROR)

    def reset(self, stream: Stream, code: ErrorCodes) -> None:
        """End a stream without a status."""
        if not self._ended and self.h2.can_send(stream.id):
            self.h2.reset_stream(stream.id, code)
            self.out.collect()

    def credit(self, stream: Stream, nbytes: int) -> None:
        """Let a caller send more on a stream."""
        if nbytes and not self._ended and self.h2.can_send(stream.id):
            self.h2.increment_flow_control_window(nbytes, stream.id)
            self.out.collect()

    def over(self, stream: Stream) -> None:
        """Forget a stream that is over."""
        if self.streams.pop(stream.id, None) is not None:
            self.bounds.streams.remove(self, 1)
            if not self.streams:
                self._place.rest()
        self.heard(stream)
        # In a drain the caller may send more until it has acknowledged the ping.
        refuses = self._last_stream < LAST_STREAM
        if (refuses or self._caller_leaves) and not self.streams:
            self.loop.call_soon(self.end)

    # ---- the end ---------------------------------------------------------------------------------

    def drain(self) -> None:
        """Let open RPCs end, take no new ones, then close."""
        if self._draining or self._ended:
            return
        self._draining = True
        # What the caller has sent before it knows is still served: the ping's ack follows it.
        self._refuses_s = self.loop.time() + _DRAIN_ACK_S
        self._goaway(LAST_STREAM)
        self.h2.ping(_DRAIN_PING)
        self.out.collect()

    def _refuse_new(self) -> None:
        """Take no new RPCs."""
        self._refuses_s = math.inf
        self._goaway(self.h2.highest_inbound_stream_id)
        if not self.streams:
            self.end()

    def _goaway(self, last: int, code: int = 0, why: bytes = b"") -> None:
        self._last_stream = last
        self.out.send(GoAwayFrame(0, last, code, why).serialize())

    def _give_up(self) -> None:
        """End it, since connections are short and it has no RPCs; one that comes now is retried."""
        self._goaway(self.h2.highest_inbound_stream_id, why=b"too many connections")
        self.end()

    def _enhance_your_calm(self, why: str) -> None:
        """End it, since its caller sends too much."""
        log.debug("connection ended", peer=self.peer, why=why)
        self._goaway(self.h2.highest_inbound_stream_id, ErrorCodes.ENHANCE_YOUR_CALM, why.encode())
        self.end()

    def tick(self, now_s: float) -> None:
        """Check times; called about once a second."""
        if self._ended:
            return
        if self.keepalive.is_dead(now_s):
            self.abort()
            return
        if self.keepalive.wants_ping(now_s):
            self.h2.ping(_KEEPALIVE_PING)
            self.out.collect()
        self._end_silent(now_s)
        if now_s >= self._leaves_s:
            self._leaves_s = math.inf
            if grace_s := self.options.max_connection_age_grace_s:
                self._cut_s = now_s + grace_s
            self.drain()
        if now_s >= self._refuses_s:
            self._refuse_new()
        if now_s >= self._cut_s:
            self.end()

    # ---- limits ----------------------------------------------------------------------------------

    def takes(self, stream_id: int) -> bool:
        """Return whether a new RPC may begin here."""
        return stream_id <= self._last_stream and len(self.streams) < self.options.max_streams

    def awaits_message(self, stream: Stream) -> None:
        """Watch that an RPC's first message comes in time."""
        self.silent[stream.id] = stream
        self.bounds.silent.add(self, 1)

    def heard(self, stream: Stream) -> None:
        """Note that an RPC's first message has come, or that it is over."""
        self.speaks = stream.got_message
        if self.silent.pop(stream.id, None) is not None:
            self.bounds.silent.remove(self, 1)

    def _goes_last(self) -> bool:
        # One may be silent: its message is often among the bytes that wait.
        return len(self.silent) > 1 or not self.speaks

    def _end_silent(self, now_s: float) -> None:
        for stream in list(self.silent.values()):
            limit_s = stream.limit_s
            if limit_s is not None and now_s - stream.begun_s < limit_s:
                continue  # another method's limit may be shorter
            stream.fail(no_first_message(limit_s or 0.0))
            self.heard(stream)

    # ---- what the caller sends -------------------------------------------------------------------

    def _on_request(self, event: events.RequestReceived) -> None:
        stream = open_stream(self, event)
        if stream is not None:
            if not self.streams:
                self._place.use()
            self.streams[stream.id] = stream
            self._begun.append(stream)
            self.bounds.streams.add(self, 1)

    def _on_data(self, event: events.DataReceived) -> None:
        self._consumed += event.flow_controlled_length
        if self._consumed >= CONNECTION_WINDOW_BYTES // 2:
            # At once: a stream whose handler doesn't read must not stop the others.
            self.h2.increment_flow_control_window(self._consumed)
            self._consumed = 0
        stream = self.streams.get(event.stream_id)
        if stream is not None:
            stream.received(event.data, event.flow_controlled_length)

    def _on_trailers(self, event: events.TrailersReceived) -> None:
        stream = self.streams.get(event.stream_id)
        if stream is not None and not are_sound(event.headers, trailers=True):
            self.reset(stream, ErrorCodes.PROTOCOL_ERROR)
            stream.lost()

    def _on_end(self, event: events.StreamEnded) -> None:
        stream = self.streams.get(event.stream_id)
        if stream is not None:
            stream.closed_by_client()

    def _on_reset(self, event: events.StreamReset) -> None:
        stream = self.streams.get(event.stream_id)
        if stream is not None:
            stream.lost()
        if not self._resets.take(self.loop.time()):
            self._enhance_your_calm("too many requests were reset")

    def _on_window(self, event: events.WindowUpdated) -> None:
        if not event.stream_id:
            self.out.pump()
            return
        stream = self.streams.get(event.stream_id)
        if stream is not None and stream.unsent is not None:
            self.out.enqueue(stream)

    def _on_settings(self, event: events.RemoteSettingsChanged) -> None:
        if SettingCodes.INITIAL_WINDOW_SIZE in event.changed_settings:
            for stream in list(self.streams.values()):
                if stream.unsent is not None:
                    self.out.enqueue(stream)

    def _on_ping(self, event: events.PingReceived) -> None:
        if self.keepalive.too_many_pings(self.loop.time()):
            self._enhance_your_calm("too_many_pings")

    def _on_goaway(self, event: events.ConnectionTerminated) -> None:
        self._caller_leaves = True
        if not self.streams:
            self.loop.call_soon(self.end)

    def _on_ping_ack(self, event: events.PingAckReceived) -> None:
        if event.ping_data == _DRAIN_PING:
            self._refuse_new()


_HANDLERS: dict[type, Callable[[Connection, Any], None]] = {
    events.RequestReceived: Connection._on_request,  # noqa: SLF001 - a table of its own methods
    events.DataReceived: Connection._on_data,  # noqa: SLF001
    events.TrailersReceived: Connection._on_trailers,  # noqa: SLF001
    events.StreamEnded: Connection._on_end,  # noqa: SLF001
    events.StreamReset: Connection._on_reset,  # noqa: SLF001
    events.WindowUpdated: Connection._on_window,  # noqa: SLF001
    events.RemoteSettingsChanged: Connection._on_settings,  # noqa: SLF001
    events.PingReceived: Connection._on_ping,  # noqa: SLF001
    events.PingAckReceived: Connection._on_ping_ack,  # noqa: SLF001
    events.ConnectionTerminated: Connection._on_goaway,  # noqa: SLF001
}
