"""Limits of the transport, each number with its reason; and what all connections hold of them."""

from __future__ import annotations

import gc
from collections.abc import Collection
from dataclasses import dataclass

from millstream_server.runtime.memory import trim_in_background
from millstream_server.runtime.rpc.channel import (
    MAX_CONCURRENT_STREAMS,
    MAX_METADATA_BYTES,
    MIN_PING_INTERVAL_S,
    SERVER_KEEPALIVE_S,
    SERVER_KEEPALIVE_TIMEOUT_S,
)
from millstream_server.runtime.rpc.ledger import Ledger
from millstream_server.runtime.telemetry import metrics
from millstream_server.runtime.transport.intake import WorkShare

_RELIEF = 0.95
"""Above the bound so much of it is kept: the search for who holds most is paid once for many."""
_MANY_STREAMS = 256
"""When nearly all of so many have ended, it is worth the time to look for what they left."""
_TRIM_BYTES = 32 << 20
"""So much less held, or so much received, is worth the time that giving memory back takes."""
_QUIET_BYTES = 1 << 20
"""What is received in a second in which memory may be given back: that stops the process for
milliseconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportOptions:
    """What a server accepts from its callers."""

    max_receive_bytes: int
    """Largest message accepted, unpacked; a larger one ends its RPC with RESOURCE_EXHAUSTED."""
    max_metadata_bytes: int = MAX_METADATA_BYTES
    """Of one RPC's headers, as HTTP/2 counts them; more ends it with RESOURCE_EXHAUSTED, a header
    block of 256 KiB its connection."""
    cors_origins: Collection[str] = frozenset()
    """Origins whose pages may call by a browser, `*` for all; the others' can't."""
    hosts: Collection[str] | None = None
    """Names besides localhost that HTTP requests may be for, `*` for all; None: nobody asks."""
    headers_s: float = 10.0
    """Longest wait until headers that have begun are there: three lost packets are repeated within
    it."""
    max_streams: int = MAX_CONCURRENT_STREAMS
    """Open RPCs of one connection; further ones are refused, and clients retry them."""
    max_open_streams: int = 10_240
    """Open RPCs of all connections. Above it, and above the two bounds below, the caller that holds
    most loses RPCs, of its connection that holds most: those without a message first."""
    max_silent_streams: int = 1000
    """Of these without a message yet. Clients send one with the headers: it is under way for
    milliseconds, unless somebody wants to take room from others."""
    max_received_bytes: int = 256 << 20
    """Of requests that no handler has read yet, whole or not, of all connections."""
    max_unsent_bytes: int = 256 << 20
    """Of responses that callers don't read, of all connections."""
    max_resets: int = 1024
    """Requests that a caller may reset while they are served, on all its connections, before these
    take no more, and on one, before it is ended; `resets_per_s` are forgiven. A client that is
    stopped may reset all it has."""
    resets_per_s: float = 102.4
    loop_share: float = 0.5
    """Of the event loop's time, for the frames of callers that take more than others."""
    first_message_s: float = 30.0
    """Longest wait for the first message of an RPC. A phone that wakes up takes seconds for its
    first packet; whoever says nothing for longer isn't there, and its stream costs memory."""
    max_connection_age_s: float = 0.0
    """After this a connection is asked to end; 0: never."""
    max_connection_age_grace_s: float = 0.0
    """How long an aged connection's RPCs may go on; 0: for ever."""
    keepalive_s: float = SERVER_KEEPALIVE_S
    keepalive_timeout_s: float = SERVER_KEEPALIVE_TIMEOUT_S
    min_ping_interval_s: float = MIN_PING_INTERVAL_S
    """Callers that send pings more often, three times, lose their connection."""
    max_connections: int = 8192
    """Open at once; fewer if the limit of open files is lower. With TLS 50 KB each: 400 MB. Above
    it the caller with most connections loses the one that has no RPCs for longest."""
    max_connections_per_address: int = 4096
    """Of one IP address, or one IPv6 network of 64 bits: a load balancer has few addresses."""
    backlog: int = 1024
    """Connections that the kernel holds until they are accepted; it may have a lower limit."""
    max_handshakes: int = 1024
    """TLS handshakes at once: 50 KB each, and a second of one core for all."""
    handshake_s: float = 10.0
    """Longest TLS handshake: three lost packets are repeated within it."""
    preface_s: float = 10.0
    """Longest wait for a new connection's first bytes after it; clients send them at once."""


class Bounds:
    """The bounds in sum, one of each kind per server."""

    def __init__(self, options: TransportOptions) -> None:
        """Allow what ``options`` say; the server says by `Ledger.shed` what is freed above it."""
        # Who opens one too many loses that one: ending more would end work that is under way, or
        # take long at once.
        self.streams = Ledger(options.max_open_streams)
        """Open RPCs."""
        self.silent = Ledger(options.max_silent_streams)
        """Those whose first message has not come."""
        self.received = Ledger(options.max_received_bytes, relief=_RELIEF)
        """Bytes of requests, whole or not, that no handler has read yet."""
        self.unsent = Ledger(options.max_unsent_bytes, relief=_RELIEF)
        """Bytes of responses that wait until their callers read."""
        self.work = WorkShare(options.loop_share, options.max_resets, options.resets_per_s)
        self.taken_bytes = 0
        """Received in this second."""
        self._many_ended = False
        self._most_bytes = 0
        """About what was held at most since memory was last given back."""
        self._taken_bytes = 0
        """Received since then."""

    def tick(self) -> None:
        """Give memory back when much less is held than was, or after much has passed or ended.

        Called about once a second.
        """
        taken, self.taken_bytes = self.taken_bytes, 0
        self._taken_bytes += taken
        held = self.received.used + self.unsent.used
        passed = self._taken_bytes > _TRIM_BYTES and taken < _QUIET_BYTES
        ended = self._many_ended
        if ended:
            # Those that were cut off left reference cycles. Nothing else may be made for long.
            gc.collect()
        # A second later: the tasks of those that were cut off at once still run now.
        self._many_ended = (
            self.streams.peak > _MANY_STREAMS and self.streams.used < self.streams.peak // 8
        )
        if self._many_ended:
            self.streams.peak = self.streams.used
        if ended or passed or self._most_bytes - held > _TRIM_BYTES:
            trim_in_background()
            self._most_bytes, self._taken_bytes = held, 0
        self._most_bytes = max(self._most_bytes, held)

    def show(self) -> None:
        """Show the sums as metrics; of a process's servers the last one's are shown."""
        metrics.TRANSPORT_STREAMS.set_function(lambda: self.streams.used)
        metrics.TRANSPORT_RECEIVED_BYTES.set_function(lambda: self.received.used)
        metrics.TRANSPORT_UNSENT_BYTES.set_function(lambda: self.unsent.used)
