"""The output of requests that has come from workers and that no client has read yet."""

from __future__ import annotations

from collections import OrderedDict
from typing import Protocol


class Gathering(Protocol):
    """A request whose output gathers."""

    def overflowed(self) -> None:
        """Fail, and call `UnreadOutput.remove` for what was not taken."""
        ...


class UnreadOutput:
    """Bounds that output, of all requests together; one per process.

    A worker that has ended a request takes the next one, so output gathers as fast as the workers
    make it, as long as a client doesn't read. Above the bound the request fails whose output has
    waited longest: one of a client that reads loses nothing.
    """

    def __init__(self, max_bytes: int = 512 << 20) -> None:
        """Allow ``max_bytes``."""
        self.used = 0
        self._max = max_bytes
        self._bytes: OrderedDict[Gathering, int] = OrderedDict()

    def add(self, request: Gathering, nbytes: int) -> None:
        """Count output of a request; if it is too much, requests fail, maybe this one."""
        self.used += nbytes
        self._bytes[request] = self._bytes.get(request, 0) + nbytes
        while self.used > self._max and self._bytes:
            oldest, _ = self._bytes.popitem(last=False)
            oldest.overflowed()

    def remove(self, request: Gathering, nbytes: int) -> None:
        """Count output as read or dropped."""
        self.used -= nbytes
        if (left := self._bytes.pop(request, 0) - nbytes) > 0:
            self._bytes[request] = left  # behind the others: somebody reads it
