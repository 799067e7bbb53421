"""The memory that clients' images and videos may take."""

from __future__ import annotations

from millstream_server.runtime.errors import OverloadedError
from millstream_server.runtime.lifecycle.memory import trim_in_background
from millstream_server.runtime.retry_delay import jittered
from millstream_server.runtime.telemetry import metrics

_RETRY_S = 1.0
_TRIM_BYTES = 64 << 20
"""After so many bytes it is worth to give the heaps' free memory back."""


class MediaBudget:
    """Counts the bytes of all conversations' media; one per process."""

    def __init__(self, max_bytes: int) -> None:
        """Allow ``max_bytes`` in all."""
        self.max_bytes = max_bytes
        self.used_bytes = 0
        self._freed_bytes = 0
        metrics.MEDIA_BYTES.set_function(lambda: self.used_bytes)

    def take(self, size: int) -> None:
        """Count bytes as held.

        Raises:
            OverloadedError: the limit would be exceeded.
        """
        if self.used_bytes + size > self.max_bytes:
            metrics.ADMISSION_REFUSED.labels("media").inc()
            raise OverloadedError(
                f"the server is busy: images and videos of open conversations fill the "
                f"{self.max_bytes} bytes it has for them; retry later",
                retry_delay_s=jittered(_RETRY_S),
            )
        self.used_bytes += size

    def give_back(self, size: int) -> None:
        """Count bytes as free."""
        self.used_bytes -= size
        self._freed_bytes += size
        if not self.used_bytes and self._freed_bytes >= _TRIM_BYTES:
            self._freed_bytes = 0
            trim_in_background()


class MediaHold:
    """The bytes that one conversation holds, until `close`."""

    __slots__ = ("_budget", "_bytes", "_closed")

    def __init__(self, budget: MediaBudget) -> None:
        """Hold nothing yet."""
        self._budget = budget
        self._bytes = 0
        self._closed = False

    def take(self, size: int) -> None:
        """Hold further bytes.

        Raises:
            OverloadedError: the process's limit would be exceeded.
        """
        self._budget.take(size)
        self._bytes += size

    def give_back(self, size: int) -> None:
        """Free some of them; no effect after `close`."""
        if not self._closed:
            self._budget.give_back(size)
            self._bytes -= size

    def close(self) -> None:
        """Free all; may be called twice."""
        self.give_back(self._bytes)
        self._closed = True
