"""Pings in both directions: ours find callers that are gone, too many of theirs are refused."""

from __future__ import annotations

from millstream_server.runtime.transport.options import TransportOptions

_MOST_STRIKES = 2


class Keepalive:
    """Decides when one connection is pinged and when it is dead. Times are the event loop's."""

    __slots__ = ("_heard_s", "_last_ping_s", "_options", "_pinged_s", "strikes")

    def __init__(self, options: TransportOptions, now_s: float) -> None:
        """Start with a connection just made."""
        self._options = options
        self._heard_s = now_s
        self._pinged_s = 0.0
        """When our ping was sent after which nothing came yet; 0: there is none."""
        self._last_ping_s = 0.0
        self.strikes = 0
        """Pings that came too soon since the caller last got a response."""

    def received(self, now_s: float) -> None:
        """Note that bytes came: an ack may be behind them, unread while the server is busy."""
        self._heard_s = now_s
        self._pinged_s = 0.0

    def wants_ping(self, now_s: float) -> bool:
        """Return whether to send a ping now; it counts as sent."""
        if self._pinged_s or now_s - self._heard_s < self._options.keepalive_s:
            return False
        self._pinged_s = now_s
        return True

    def is_dead(self, now_s: float) -> bool:
        """Return whether a ping was not answered in time."""
        return bool(self._pinged_s) and now_s - self._pinged_s > self._options.keepalive_timeout_s

    def too_many_pings(self, now_s: float) -> bool:
        """Count a caller's ping; return whether its connection is to be ended."""
        if now_s - self._last_ping_s < self._options.min_ping_interval_s:
            self.strikes += 1
        self._last_ping_s = now_s
        return self.strikes > _MOST_STRIKES
