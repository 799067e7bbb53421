"""What all connections of a server may hold together."""

from __future__ import annotations

from millstream_server.runtime.memory import trim_in_background
from millstream_server.runtime.rpc.ledger import Ledger
from millstream_server.runtime.telemetry import metrics
from millstream_server.runtime.transport.intake import WorkShare
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
