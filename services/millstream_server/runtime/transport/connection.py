"""One connection: frames in become streams' events; frames out are one write per loop turn."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from h2.errors import ErrorCodes

from millstream_server.runtime.rpc.call import CertificateName, key_of_address
from millstream_server.runtime.rpc.ledger import Place
from millstream_server.runtime.rpc.serving import no_first_message
from millstream_server.runtime.telemetry.log import get_log
from millstream_server.runtime.transport.frame_reader import HeaderBlock
from millstream_server.runtime.transport.frames import take_frame
from millstream_server.runtime.transport.h2_state import LAST_STREAM, ServerState
from millstream_server.runtime.transport.intake import STREAM_S, Intake, RateLimit, Work
from millstream_server.runtime.transport.options import TransportOptions
from millstream_server.runtime.transport.output import Outbox
from millstream_server.runtime.transport.sockets import certificate_names, peer_name
from millstream_server.runtime.transport.stream import Stream

if TYPE_CHECKING:
    from millstream_server.runtime.transport.server import H2Server

log = get_log(__name__)

_KEEPALIVE_PING = b"millping"
_DRAIN_PING = b"milldrai"
"""Its ack says that the caller knows of the drain."""
_DRAIN_ACK_S = 10.0
"""Longest wait in a drain until the caller knows of it."""
_LINGER_S = 2.0
"""Longest wait until a caller has read the last bytes of a connection that ends."""


class Ending:
    """When one connection ends: its caller is gone or leaves, its age, a drain.

    It sends GOAWAYs, and the pings that find callers that are gone. Times are the event loop's.
    """

    __slots__ = ("_cut_s", "_draining", "_grace_s", "_h2", "_heard_s", "_last_ping_s",
                 "_last_stream", "_leaves_s", "_options", "_pinged_s", "_refuses_s",
                 "caller_leaves")  # fmt: skip

    def __init__(self, options: TransportOptions, h2: ServerState, now_s: float) -> None:
        age_s = options.max_connection_age_s * random.uniform(0.9, 1.1)  # noqa: S311 - to spread
        self._leaves_s = now_s + age_s if age_s else math.inf
        self._grace_s = options.max_connection_age_grace_s or math.inf
        self._cut_s = self._refuses_s = math.inf
        self._options = options
        self._h2 = h2
        self._draining = False
        self._last_stream = LAST_STREAM
        self.caller_leaves = False
        """The caller sent GOAWAY."""
        self._heard_s = now_s
        self._pinged_s = 0.0
        """When our ping was sent after which nothing came yet; 0: there is none."""
        self._last_ping_s = 0.0

    @property
    def takes_no_more(self) -> bool:
        """Whether no RPC will come; in a drain some may until the caller knows of it."""
        return self.caller_leaves or self._last_stream < LAST_STREAM

    def takes(self, stream_id: int) -> bool:
        return stream_id <= self._last_stream

    def heard(self, now_s: float) -> None:
        """Note that bytes came: an ack may be behind them, unread while the server is busy."""
        self._heard_s = now_s
        self._pinged_s = 0.0

    def is_early(self, now_s: float) -> bool:
        """Return whether a caller's ping comes too soon after the last one."""
        last_s, self._last_ping_s = self._last_ping_s, now_s
        return now_s - last_s < self._options.min_ping_interval_s

    def is_dead(self, now_s: float) -> bool:
        return bool(self._pinged_s) and now_s - self._pinged_s > self._options.keepalive_timeout_s

    def begin(self, now_s: float) -> None:
        """Announce that no new RPCs are taken soon; nothing happens if that was done."""
        if self._draining:
            return
        self._draining = True
        # What the caller has sent before it knows is still served: the ping's ack follows it.
        self._refuses_s = now_s + _DRAIN_ACK_S
        self._goaway(LAST_STREAM)
        self._h2.ping(_DRAIN_PING)

    def acknowledged(self, ping: bytes) -> None:
        """Note the ack of a ping: that of `begin` tells that nothing follows which is served."""
        if ping == _DRAIN_PING:
            self.refuse_new()

    def refuse_new(self, code: int = 0, why: str = "") -> None:
        self._refuses_s = math.inf
        self._goaway(self._h2.highest_inbound_stream_id, code, why)

    def tick(self, now_s: float) -> bool:
        """Check times; return whether to end the connection with what is open."""
        if not self._pinged_s and now_s - self._heard_s >= self._options.keepalive_s:
            self._pinged_s = now_s
            self._h2.ping(_KEEPALIVE_PING)
        if now_s >= self._leaves_s:
            self._leaves_s = math.inf
            self._cut_s = now_s + self._grace_s
            self.begin(now_s)
        if now_s >= self._refuses_s:
            self.refuse_new()
        return now_s >= self._cut_s

    def _goaway(self, last: int, code: int = 0, why: str = "") -> None:
        self._last_stream = last
        self._h2.goaway(last, code, why)


class Connection(asyncio.Protocol):
    """An HTTP/2 connection with its RPCs. All calls come from the event loop's thread."""

    def __init__(self, server: H2Server, place: Place) -> None:
        """Serve RPCs of ``server``; ``place`` is given back at the end."""
        self.server = server
        self.options = options = server.options
        self.loop = asyncio.get_running_loop()
        self.out = Outbox(self.loop)
        self.h2 = ServerState(options, self.out.send)
        self.streams: dict[int, Stream] = {}
        """Open RPCs by their streams' ids."""
        self.peer = ""
        self.caller_key = ""
        self.certificate_names: Sequence[CertificateName] | None = None
        now_s = self.loop.time()
        self.strikes = 0
        """Pings that came too soon since the caller last got a response."""
        self.bounds = bounds = server.bounds
        self.silent: dict[int, Stream] = {}
        """RPCs whose first message has not come, the oldest first."""
        self.brings_messages = False
        """The last that was heard of its RPCs is a message, not that one ended without."""
        work, handle = Work(bounds.work, now_s), partial(take_frame, self)
        self._intake = Intake(self.loop, work, handle, self._start, self._goes_last)
        self.resets = RateLimit(options.max_resets, options.resets_per_s, now_s)
        self.ending = Ending(options, self.h2, now_s)
        self._place = place
        # Connections are short: mostly it has no RPCs, and one that comes now is retried.
        place.give_up = partial(self.fail, ErrorCodes.NO_ERROR, "too many connections")
        self._transport: Any = None
        self.stuck_bytes = 0
        """In the socket's buffer while it is full."""
        self._begun: list[Stream] = []
        self.work_begun_s = 0.0
        """About what requests will take whose messages have come in this slice."""
        self.block = HeaderBlock(self.h2.reader, bounds.received, now_s)
        self._ended = False

    # ---- the socket ------------------------------------------------------------------------------

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self.out.open(transport, self.h2)
        self._intake.open(transport)
        self.peer = peer_name(transport.get_extra_info("peername"))
        self.caller_key = key_of_address(self.peer)
        self.certificate_names = certificate_names(transport)
        self.h2.begin()
        self.server.connections.add(self)

    def data_received(self, data: bytes) -> None:
        self.ending.heard(self.loop.time())
        self.bounds.taken_bytes += len(data)
        self._intake.take(data)

    def _start(self) -> float:
        """Start the RPCs that have begun; return about how long, in seconds, their work takes.

        Only now: what was reset in the same bytes costs no task.
        """
        begun, self._begun = self._begun, []
        work_s, self.work_begun_s = self.work_begun_s, 0.0
        for stream in begun:
            stream.start()
        self.block.count(self)
        return len(begun) * STREAM_S + work_s

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

    def connection_lost(self, exc: Exception | None) -> None:
        self._ended = True
        for stream in list(self.streams.values()):
            stream.lost()
        self._unstuck()
        self.block.drop(self)
        self.out.close()
        self._intake.stop()
        self.h2.release()
        self.server.forget(self)
        self._place.free()

    def end(self) -> None:
        """Send what there is, then close; RPCs that are open are cancelled."""
        if self._ended:
            return
        self._ended = True
        self._intake.stop()
        self.out.flush()
        for stream in list(self.streams.values()):
            stream.lost()
        self._transport.close()
        # A caller that doesn't read what is left would keep it open.
        self.loop.call_later(_LINGER_S, self._transport.abort)

    def abort(self) -> None:
        self._ended = True
        self._unstuck()
        self._intake.stop()
        self._transport.abort()

    @property
    def takes_no_more(self) -> bool:
        return self.ending.takes_no_more

    @property
    def head_bytes(self) -> int:
        """Of a header block that hasn't come whole."""
        return self.block.nbytes

    def shed_head(self) -> None:
        self.block.drop(self)
        self.enhance_your_calm("too many headers of all callers haven't come whole")

    # ---- for streams ----------------------------------------------------------------------------

    def awaits_message(self, stream_id: int) -> None:
        self.silent[stream_id] = self.streams[stream_id]
        self.bounds.silent.add(self)

    def heard(self, stream_id: int, *, message: bool) -> None:
        """Note that an RPC's first message has come; not ``message``: it has ended without."""
        self.brings_messages = message
        if self.silent.pop(stream_id, None) is not None:
            self.bounds.silent.remove(self)

    def over(self, stream_id: int) -> None:
        if self.streams.pop(stream_id, None) is not None:
            self.bounds.streams.remove(self)
            if not self.streams:
                self._place.mark_unused()
        self.end_if_unused()

    def add(self, stream: Stream) -> None:
        """Take a stream that has begun; it starts when the bytes that came with it are read."""
        if not self.streams:
            self._place.mark_used()
        self.streams[stream.id] = stream
        self._begun.append(stream)
        self.bounds.streams.add(self)

    # ---- the end ---------------------------------------------------------------------------------

    def drain(self) -> None:
        """Let open RPCs end, take no new ones, then close."""
        if not self._ended:
            self.ending.begin(self.loop.time())

    def end_if_unused(self) -> None:
        """End it if it has no RPCs and either side wants no more."""
        if self.ending.takes_no_more and not self.streams:
            self.loop.call_soon(self.end)

    def enhance_your_calm(self, why: str) -> None:
        """End it, since its caller sends too much."""
        log.debug("connection ended", peer=self.peer, why=why)
        self.fail(ErrorCodes.ENHANCE_YOUR_CALM, why)

    def fail(self, code: ErrorCodes, why: str) -> None:
        """End it with a GOAWAY that says why."""
        self.ending.refuse_new(code, why)
        self.end()

    def tick(self, now_s: float) -> None:
        """Check times; called about once a second."""
        if self._ended:
            return
        if self.ending.is_dead(now_s):
            self.abort()
            return
        self._end_silent(now_s)
        if self.block.age_s(now_s, waits=self._intake.waits) > self.options.headers_s:
            self.enhance_your_calm("a header block that doesn't come whole")
        elif self.ending.tick(now_s):
            self.end()
        else:
            self.end_if_unused()

    def _goes_last(self) -> bool:
        # One may be silent: its message is often among the bytes that wait.
        return len(self.silent) > 1 or not self.brings_messages

    def _end_silent(self, now_s: float) -> None:
        for stream in list(self.silent.values()):
            limit_s = stream.limit_s
            if limit_s is not None and now_s - stream.begun_s < limit_s:
                continue  # another method's limit may be shorter
            stream.fail(no_first_message(limit_s or 0.0))
