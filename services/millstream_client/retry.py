"""Which failed requests are sent again, and after which pause."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass

from millstream_client.errors import MillstreamError


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """Sends a request again after a temporary failure, if no part of its answer has arrived.

    That is safe: a request has no effect but its answer. Once a part of the answer has arrived, the
    failure is raised.
    """

    attempts: int = 4
    """Most attempts of one request, including the first."""
    first_pause_s: float = 0.2
    """Pause before the second attempt; each further one is twice as long. The server's pause
    (``RetryInfo``) is used instead if it is longer."""
    max_pause_s: float = 10.0
    """Longest pause; if the server requests a longer one, the failure is raised instead."""
    wait_s: float = 10.0
    """Longest wait for a connection before an attempt."""


NO_RETRY = Retry(attempts=1)
"""No retries: every failure is raised at once."""


class Attempts:
    """The attempts of one request, within its time-out."""

    def __init__(self, retry: Retry, timeout_s: float | None) -> None:
        """Begin; the time-out starts now."""
        self._retry = retry
        self._made = 1
        self._deadline_s = None if timeout_s is None else time.monotonic() + timeout_s

    def timeout_s(self) -> float | None:
        """Return the seconds left; None without a limit."""
        if self._deadline_s is None:
            return None
        return max(0.0, self._deadline_s - time.monotonic())

    def pause_s(self, error: MillstreamError) -> float | None:
        """Return the pause before the next attempt in seconds; None if there is no next attempt."""
        if not error.retryable or self._made >= self._retry.attempts:
            return None
        asked = error.retry_delay_s or 0.0
        own = min(self._retry.first_pause_s * 2.0 ** (self._made - 1), self._retry.max_pause_s)
        # Clients that fail together, as in a restart, shouldn't retry together.
        pause = max(asked, own) * random.uniform(1.0, 1.2)  # noqa: S311 - no secret
        left = self.timeout_s()
        if asked > self._retry.max_pause_s or (left is not None and pause >= left):
            return None
        self._made += 1
        return pause

    def wait_s(self) -> float:
        """Return the longest wait for a connection in seconds."""
        left = self.timeout_s()
        return self._retry.wait_s if left is None else min(self._retry.wait_s, left)
