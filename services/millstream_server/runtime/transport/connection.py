"""One connection: frames in become streams' events; frames out are one write per loop turn."""

from __future__ import annotations

import math
import random
from functools import partial
from typing import TYPE_CHECKING, Any

from h2.errors import ErrorCodes

from millstream_server.runtime.errors import UnavailableError
from millstream_server.runtime.rpc.ledger import Place
from millstream_server.runtime.telemetry.log import get_log
from millstream_server.runtime.transport.connection_base import BaseConnection
from millstream_server.runtime.transport.frame_reader import HeaderBlock
from millstream_server.runtime.transport.frames import take_frame
from millstream_server.runtime.transport.h2_state import LAST_STREAM, ServerState
from millstream_server.runtime.transport.intake import STREAM_S, Intake, RateLimit
from millstream_server.runtime.transport.options import TransportOptions
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
"""Longest wait until a caller has what is left on a connection that ends."""
_AGED = "this connection is too old (--max-connection-age-s); send it again on another one"


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
        """Check times; return whether to end what is open."""
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


class Connection(BaseConnection):
    """An HTTP/2 connection with its RPCs."""

    def __init__(self, server: H2Server, place: Place) -> None:
        """See `BaseConnection`."""
        super().__init__(server, place)
        options, bounds, now_s = self.options, self.bounds, self.loop.time()
        self.h2 = ServerState(options, self.out.send)
        self.strikes = 0
        """Pings that came too soon since the caller last got a response."""
        handle = partial(take_frame, self)
        self._intake = Intake(self.loop, bounds.work, handle, self._start, self._goes_last)
        self._resets = RateLimit(options.max_resets, options.resets_per_s, now_s)
        self.ending = Ending(options, self.h2, now_s)
        # Connections are short: mostly it has no RPCs, and one that comes now is retried.
        place.give_up = partial(self.fail, ErrorCodes.NO_ERROR, "too many connections")
        self._begun: list[Stream] = []
        self.block = HeaderBlock(self.h2.reader, bounds.received, now_s)

    # ---- the socket ------------------------------------------------------------------------------

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.out.open(transport, self.h2)
        self._intake.open(transport, self.caller_key, ends_at_fin=True)
        self.server.connections.add(self)
        self.h2.begin()

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

    def connection_lost(self, exc: Exception | None) -> None:
        self._ended = True
        for stream in self.streams.values():
            stream.sender.drop()  # until its end it makes nothing to send
            self.server.lost(stream)
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

    def count_reset(self) -> None:
        """Note that a request was reset, by its caller or for its fault.

        Above the bound of all its caller's connections it only takes no more: behind a proxy they
        are other users'.
        """
        now_s, why = self.loop.time(), "too many requests were reset"
        if not self._resets.take(now_s):
            self.enhance_your_calm(why)
        elif not self._intake.work.resets.take(now_s) and not self.ending.takes_no_more:
            self.ending.refuse_new(ErrorCodes.ENHANCE_YOUR_CALM, why)
            self.end_if_unused()

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
            for stream in list(self.streams.values()):
                stream.fail(UnavailableError(_AGED))
            self.loop.call_later(_LINGER_S, self.end)
        else:
            self.end_if_unused()
