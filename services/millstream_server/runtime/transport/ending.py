"""When one connection takes no more RPCs: at its age, when it is drained, or its caller leaves."""

from __future__ import annotations

import math
import random

from millstream_server.runtime.transport.h2_state import LAST_STREAM, ServerState
from millstream_server.runtime.transport.options import TransportOptions
from millstream_server.runtime.transport.outbox import Outbox

DRAIN_PING = b"milldrai"
"""Its ack says that the caller knows of the drain."""
_DRAIN_ACK_S = 10.0
"""Longest wait in a drain until the caller knows of it."""


class Ending:
    """Sends the GOAWAYs of one connection. Times are the event loop's."""

    __slots__ = (
        "_cut_s",
        "_draining",
        "_grace_s",
        "_h2",
        "_last_stream",
        "_leaves_s",
        "_out",
        "_refuses_s",
        "caller_leaves",
    )

    def __init__(
        self, options: TransportOptions, h2: ServerState, out: Outbox, now_s: float
    ) -> None:
        """Start with a connection just made."""
        age_s = options.max_connection_age_s * random.uniform(0.9, 1.1)  # noqa: S311 - to spread
        self._leaves_s = now_s + age_s if age_s else math.inf
        self._grace_s = options.max_connection_age_grace_s or math.inf
        self._cut_s = self._refuses_s = math.inf
        self._h2 = h2
        self._out = out
        self._draining = False
        self._last_stream = LAST_STREAM
        self.caller_leaves = False
        """The caller sent GOAWAY."""

    @property
    def takes_no_more(self) -> bool:
        """Whether no RPC will come; in a drain some may until the caller knows of it."""
        return self.caller_leaves or self._last_stream < LAST_STREAM

    def takes(self, stream_id: int) -> bool:
        """Return whether a new RPC is served."""
        return stream_id <= self._last_stream

    def begin(self, now_s: float) -> None:
        """Announce that no new RPCs are taken soon; nothing happens if that was done."""
        if self._draining:
            return
        self._draining = True
        # What the caller has sent before it knows is still served: the ping's ack follows it.
        self._refuses_s = now_s + _DRAIN_ACK_S
        self._goaway(LAST_STREAM)
        self._h2.ping(DRAIN_PING)
        self._out.collect()

    def refuse_new(self, code: int = 0, why: str = "") -> None:
        """Take no new RPCs from here on."""
        self._refuses_s = math.inf
        self._goaway(self._h2.highest_inbound_stream_id, code, why)

    def tick(self, now_s: float) -> bool:
        """Check times; return whether to end the connection with what is open."""
        if now_s >= self._leaves_s:
            self._leaves_s = math.inf
            self._cut_s = now_s + self._grace_s
            self.begin(now_s)
        if now_s >= self._refuses_s:
            self.refuse_new()
        return now_s >= self._cut_s

    def _goaway(self, last: int, code: int = 0, why: str = "") -> None:
        self._last_stream = last
        self._out.send(self._h2.goaway(last, code, why))
