"""A bound on open streams of one kind that leaves room for every caller."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator

from millstream_server.runtime.errors import OverloadedError

_RETRY_S = 10.0


class Shares:
    """Bounds streams in sum and by caller.

    A caller may open one more while it holds fewer than are free: alone it gets half of all, beside
    k others that take what they can one part in k + 2. So no limit by caller has to be chosen, and
    the first stream of a caller is refused only when all are taken.
    """

    def __init__(self, most: int, what: str) -> None:
        """Allow ``most`` in sum; ``what`` names the streams in the error."""
        self._most = most
        self._what = what
        self._held: Counter[str] = Counter()

    @property
    def used(self) -> int:
        """How many are open."""
        return self._held.total()

    @contextlib.contextmanager
    def take(self, caller_key: str) -> Iterator[None]:
        """Hold one while the block runs.

        Raises:
            OverloadedError: too many are open, of this caller or in sum.
        """
        held, free = self._held[caller_key], self._most - self.used
        if held >= free:
            if not held:
                del self._held[caller_key]
            raise OverloadedError(
                f"{self._most - free} {self._what} are open on this server, {held} of them yours; "
                f"it allows {self._most}, and one caller as many as are free",
                retry_delay_s=_RETRY_S,
            )
        self._held[caller_key] += 1
        try:
            yield
        finally:
            self._held[caller_key] -= 1
            if not self._held[caller_key]:  # callers can have any number of addresses
                del self._held[caller_key]
