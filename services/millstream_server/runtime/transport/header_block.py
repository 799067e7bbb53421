"""The header block that a caller has begun: counted among all that is received, and timed."""

from __future__ import annotations

from millstream_server.runtime.transport.frame_reader import FrameReader
from millstream_server.runtime.transport.limits.bounds import Bound, Holder


class HeaderBlock:
    """One connection's. Times are the event loop's."""

    __slots__ = ("_number", "_reader", "_received", "_since_s", "nbytes")

    def __init__(self, reader: FrameReader, received: Bound, now_s: float) -> None:
        """Count what ``reader`` holds in ``received``."""
        self._reader = reader
        self._received = received
        self._number = 0
        self._since_s = now_s
        """Since when the block with this number has begun."""
        self.nbytes = 0
        """What it holds, as counted."""

    def count(self, holder: Holder) -> None:
        """Count what it holds now."""
        more = self._reader.block_bytes - self.nbytes
        if more:
            self.nbytes += more
            if more > 0:
                self._received.add(holder, more)
            else:
                self._received.remove(holder, -more)

    def drop(self, holder: Holder) -> None:
        """Count it no more."""
        self._received.remove(holder, self.nbytes)
        self.nbytes = 0

    def age_s(self, now_s: float, *, waits: bool) -> float:
        """Return since when it hasn't come whole, as seen once a second; 0: none has begun.

        While bytes wait for their turn here they may be whole: that is no delay of the caller.
        """
        reader = self._reader
        if not reader.in_block or reader.blocks != self._number or waits:
            self._number, self._since_s = reader.blocks, now_s
        return now_s - self._since_s
