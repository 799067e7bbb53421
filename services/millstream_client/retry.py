"""When a request is sent again, and after which pause."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass

from millstream_client.errors import MillstreamError


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """Sends a request again that failed in a way that may pass, before any of its answer arrived.

    Nothing was generated for the caller by then, and a request has no effect but its answer. Once a
    part of the answer has arrived, the failure is the caller's to handle.
    """

    attempts: int = 4
    """How often one request is sent, the first time included."""
    first_pause_s: float = 0.2
    """Pause before the second attempt; each further one is twice as long. A pause that the server
    asks for (``RetryInfo``) counts instead if it is longer."""
    max_pause_s: float = 10.0
    """Longest pause; when the server asks for a longer one, the failure is raised instead."""
    wait_s: float = 10.0
    """Longest wait for a connection before a request is sent again."""


NO_RETRY = Retry(attempts=1)
"""Every failure is raised at once."""


class Attempts:
    """The attempts of one request, within the time it has."""

    def __init__(self, retry: Retry, timeout_s: float | None) -> None:
        """Begin; the time runs from here."""
        self._retry = retry
        self._made = 1
        self._deadline_s = None if timeout_s is None else time.monotonic() + timeout_s

    def timeout_s(self) -> float | None:
        """Give the time left; None when there is no end."""
        if self._deadline_s is None:
            return None
        return max(0.0, self._deadline_s - time.monotonic())

    def pause_s(self, error: MillstreamError) -> float | None:
        """Give the pause before the next attempt; None when there is none."""
        if not error.retryable or self._made >= self._retry.attempts:
            return None
        asked = error.retry_delay_s or 0.0
        own = min(self._retry.first_pause_s * 2.0 ** (self._made - 1), self._retry.max_pause_s)
        # Those whom one restart hit together shouldn't come back together.
        pause = max(asked, own) * random.uniform(1.0, 1.2)  # noqa: S311  # no secret
        left = self.timeout_s()
        if asked > self._retry.max_pause_s or (left is not None and pause >= left):
            return None
        self._made += 1
        return pause

    def wait_s(self) -> float:
        """Give the longest wait for a connection."""
        left = self.timeout_s()
        return self._retry.wait_s if left is None else min(self._retry.wait_s, left)
