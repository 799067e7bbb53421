"""Bounds of what workers send: output that no client has read yet, or that nobody asked for."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Hashable
from typing import Protocol

from millstream_server.runtime.errors import OverloadedError, WorkerLostError
from millstream_server.runtime.lifecycle.memory import trim_in_background
from millstream_server.runtime.retry_delay import jittered
from millstream_server.runtime.telemetry.log import get_log

log = get_log(__name__)

_RETRY_S = 1.0
_TRIMMED_BYTES = 32 << 20
"""After so much, free memory is given back; less isn't worth the time."""
_TRIM_AFTER_S = 2.0


class Gathering(Protocol):
    """A request whose output gathers."""

    @property
    def payer(self) -> Hashable:
        """Whose it is: the outputs of one payer's requests count together."""
        ...

    def overflowed(self) -> None:
        """Fail, and call `UnreadOutput.remove` for what was not taken."""
        ...


class UnreadOutput:
    """Bounds that output, of all requests together; one per process.

    A worker that has ended a request takes the next one, so output gathers as fast as the workers
    make it, as long as a client doesn't read. Above the bound a request fails: of the payer whose
    requests hold most, the one that holds most. Those who read hold next to nothing.
    """

    def __init__(self, max_bytes: int = 512 << 20) -> None:
        """Allow ``max_bytes``."""
        self.used = 0
        self._max = max_bytes
        self._most = 0
        """The most that was used since memory was given back."""
        self._payers: Counter[Hashable] = Counter()
        self._requests: dict[Hashable, dict[Gathering, int]] = {}

    def add(self, request: Gathering, nbytes: int) -> None:
        """Count output of a request; if it is too much, requests fail, maybe this one."""
        self.used += nbytes
        self._payers[request.payer] += nbytes
        held = self._requests.setdefault(request.payer, {})
        held[request] = held.get(request, 0) + nbytes
        self._most = max(self._most, self.used)
        while self.used > self._max and self._payers:
            self._end_largest()

    def remove(self, request: Gathering, nbytes: int) -> None:
        """Count output as read or dropped."""
        self.used -= nbytes
        self._uncount(request, nbytes)
        if self._most > _TRIMMED_BYTES and self.used < self._most // 8:
            self._most = self.used
            # Later: the request may still have at hand what it has read or dropped.
            asyncio.get_running_loop().call_later(_TRIM_AFTER_S, trim_in_background)

    def _uncount(self, request: Gathering, nbytes: int) -> None:
        payer = request.payer
        held = self._requests.get(payer)
        if held is None or request not in held:  # it has overflowed
            return
        self._payers[payer] -= nbytes
        held[request] -= nbytes
        if held[request] <= 0:
            del held[request]
        if not held:
            del self._requests[payer], self._payers[payer]

    def _end_largest(self) -> None:
        payer = max(self._payers, key=self._payers.__getitem__)
        held = self._requests[payer]
        request = max(held, key=held.__getitem__)
        self._uncount(request, held[request])  # first: it must not be chosen again
        request.overflowed()


def overflow() -> OverloadedError:
    """Make the error of a request that `UnreadOutput` ends."""
    return OverloadedError(
        "the server is busy: too much output waits for clients to read it, and this caller's "
        "requests hold most of it; read faster, or start fewer requests at once",
        retry_delay_s=jittered(_RETRY_S),
    )


def not_asked_for(worker: str, sent: str) -> WorkerLostError:
    """Log that a worker sent what was not asked for; return the failure of its request."""
    log.error("a worker sent what was not asked for", worker=worker, sent=sent)
    return WorkerLostError(
        "the worker sent something else than what was asked for; send the request again"
    )
