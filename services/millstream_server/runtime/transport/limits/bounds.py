"""What all connections of a server may hold together; above a bound, who holds most pays first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from millstream_server.runtime.lifecycle.memory import trim_in_background
from millstream_server.runtime.telemetry import metrics
from millstream_server.runtime.transport.limits.work import WorkShare
from millstream_server.runtime.transport.options import TransportOptions

_RELIEF = 0.95
"""Above the bound so much of it is kept: the search for who holds most is paid once for many."""
_STREAM_BYTES = 6 << 10
"""About what an open RPC takes besides its messages."""
_TRIM_BYTES = 32 << 20
"""So much less held, or so much received, is worth the time that giving memory back takes."""
_QUIET_BYTES = 1 << 20
"""What is received in a second in which memory may be given back: that stops the process for
milliseconds."""


class Holder(Protocol):
    """A connection."""

    caller_key: str
    """Who pays: several connections may be of one caller."""


Shed = Callable[[Any], bool]
"""Frees a part of what a holder holds, by `Bound.remove`; returns False if it can't."""


class Bound:
    """Bounds one thing, such as bytes, in sum over all connections.

    Above the bound the caller is found that holds most, of its connections the one that holds most,
    and of that a part is shed: a caller that holds little loses nothing while others hold more.
    """

    def __init__(self, most: int, shed: Shed, *, relief: float = _RELIEF) -> None:
        """Allow ``most``; above it ``relief`` of it is kept."""
        self._kept = relief * most
        self.used = 0
        """What all hold together."""
        self._most = most
        self._shed = shed
        self._held: dict[str, dict[Holder, int]] = {}
        self._by_caller: dict[str, int] = {}
        """What each caller's connections hold together."""
        self._relieving = False

    def of(self, holder: Holder) -> int:
        """Return what one holds."""
        return self._held.get(holder.caller_key, {}).get(holder, 0)

    def add(self, holder: Holder, amount: int) -> None:
        """Count more as held; parts may be shed, maybe also of this holder's."""
        key = holder.caller_key
        mine = self._held.setdefault(key, {})
        mine[holder] = mine.get(holder, 0) + amount
        self._by_caller[key] = self._by_caller.get(key, 0) + amount
        self.used += amount
        if self.used > self._most and not self._relieving:
            self._relieve()

    def remove(self, holder: Holder, amount: int) -> None:
        """Count less as held."""
        self.used -= amount
        key = holder.caller_key
        mine = self._held.get(key)
        if mine is None:
            return
        self._by_caller[key] -= amount
        left = mine.get(holder, 0) - amount
        if left > 0:
            mine[holder] = left
            return
        mine.pop(holder, None)
        if not mine:
            del self._held[key], self._by_caller[key]

    def _relieve(self) -> None:
        self._relieving = True
        try:
            while self.used > self._kept and self._held:
                most = self._held[max(self._by_caller, key=self._by_caller.__getitem__)]
                if not self._shed(max(most, key=most.__getitem__)):
                    return
        finally:
            self._relieving = False


class Bounds:
    """The bounds in sum, one of each kind per server."""

    def __init__(
        self,
        options: TransportOptions,
        *,
        shed_stream: Shed,
        shed_silent: Shed,
        shed_received: Shed,
        shed_unsent: Shed,
    ) -> None:
        """Allow what ``options`` say; see `shedding` for the others."""
        # Who opens one too many loses that one: ending more would end work that is under way, or
        # take long at once.
        self.streams = Bound(options.max_open_streams, shed_stream, relief=1.0)
        """Open RPCs."""
        self.silent = Bound(options.max_silent_streams, shed_silent, relief=1.0)
        """Those whose first message has not come."""
        self.received = Bound(options.max_received_bytes, shed_received)
        """Bytes of requests, whole or not, that no handler has read yet."""
        self.unsent = Bound(options.max_unsent_bytes, shed_unsent)
        """Bytes of responses that wait until their callers read."""
        self.work = WorkShare(options.loop_share)
        self.taken_bytes = 0
        """Received in this second."""
        self._most_bytes = 0
        """About what was held at most since memory was last given back."""
        self._taken_bytes = 0
        """Received since then."""

    def tick(self) -> None:
        """Give memory back when much less is held than was, or after much has passed.

        Called about once a second.
        """
        taken, self.taken_bytes = self.taken_bytes, 0
        self._taken_bytes += taken
        streams_bytes = self.streams.used * _STREAM_BYTES
        held = self.received.used + self.unsent.used + streams_bytes
        passed = self._taken_bytes > _TRIM_BYTES and taken < _QUIET_BYTES
        if passed or self._most_bytes - held > _TRIM_BYTES:
            trim_in_background()
            self._most_bytes, self._taken_bytes = held, 0
        self._most_bytes = max(self._most_bytes, held)

    def show(self) -> None:
        """Show the sums as metrics; of a process's servers the last one's are shown."""
        metrics.TRANSPORT_STREAMS.set_function(lambda: self.streams.used)
        metrics.TRANSPORT_RECEIVED_BYTES.set_function(lambda: self.received.used)
        metrics.TRANSPORT_UNSENT_BYTES.set_function(lambda: self.unsent.used)
