"""Bounds of what workers send: output that no client has read yet, or that nobody asked for."""

from __future__ import annotations

import asyncio
from typing import Protocol

from millstream_server.runtime.errors import OverloadedError, WorkerLostError
from millstream_server.runtime.memory import trim_in_background
from millstream_server.runtime.retry_delay import jittered
from millstream_server.runtime.rpc.ledger import Holder, Ledger
from millstream_server.runtime.telemetry.log import get_log

log = get_log(__name__)

_RETRY_S = 1.0
_MOST_LATE = 1024
"""A proxy that stops for seconds has as many chats. Workers go on with them: each takes its part of
the event loop's time with every step, until the client reads or leaves."""
_TRIMMED_BYTES = 32 << 20
"""After so much, free memory is given back; less isn't worth the time."""
_TRIM_AFTER_S = 2.0


class Gathering(Holder, Protocol):
    """A request whose output gathers."""

    def overflowed(self) -> None:
        """Fail, and call `UnreadOutput.remove` for what was not taken."""
        ...


class UnreadOutput(Ledger):
    """Bounds that output, of all requests together; one per process.

    A worker that has ended a request takes the next one, so output gathers as fast as the workers
    make it, as long as a client doesn't read. Above the bound a request fails: of the caller whose
    requests hold most, the one that holds most. Those who read hold next to nothing.

    Running requests whose clients are late to read (`late`) are bounded by their number, too.
    """

    def __init__(self, max_bytes: int = 512 << 20) -> None:
        super().__init__(max_bytes, lambda request: request.overflowed())
        self.late = Ledger(_MOST_LATE, lambda request: request.overflowed())

    def remove(self, request: Holder, nbytes: int = 1) -> None:
        super().remove(request, nbytes)
        if self.peak > _TRIMMED_BYTES and self.used < self.peak // 8:
            self.peak = self.used
            # Later: the request may still have at hand what it has read or dropped.
            asyncio.get_running_loop().call_later(_TRIM_AFTER_S, trim_in_background)


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
