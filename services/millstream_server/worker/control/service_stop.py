"""Takes a worker out of service for a while, and back: health, refusals, open requests.

The order is that of a shutdown (`runtime.lifecycle.drain`), but long streams aren't notified:
health turns NOT_SERVING; requests are accepted for ``propagation_s``, until routers have noticed;
then new ones are refused with `WorkerPausedError`; open ones end. A shutdown may begin meanwhile.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Iterator
from contextlib import contextmanager

from millstream_server.runtime.errors import DeadlinePassedError, OperationConflictError
from millstream_server.runtime.lifecycle.conditions import HealthCondition, HealthConditions
from millstream_server.runtime.lifecycle.drain import OpenWork
from millstream_server.worker.expected_silence import ExpectedSilence


class Cause(enum.Enum):
    """Why a worker is out of service; the values are its health conditions."""

    DRAINED = "drained"
    PAUSED = "paused"
    MEMORY = "memory released"
    WEIGHTS = "updating weights"
    CACHE = "flushing cache"


class ServiceStop:
    """Out of service while any cause holds. All calls come from one event loop."""

    def __init__(
        self,
        work: OpenWork,
        silence: ExpectedSilence,
        conditions: HealthConditions,
        propagation_s: float,
    ) -> None:
        """Refuse new requests in ``work``; add a health condition for each cause."""
        self._work = work
        self._silence = silence
        self._propagation_s = propagation_s
        self._conditions: dict[Cause, HealthCondition] = {
            cause: conditions.own(cause.value) for cause in Cause
        }
        self._timer: asyncio.TimerHandle | None = None
        self._refusing = asyncio.Event()

    def holds(self, cause: Cause) -> bool:
        """Return whether the worker is out of service for this cause."""
        return self._conditions[cause].holds

    @property
    def open_requests(self) -> int:
        """Open requests and, in workers that encode, results that are still to be fetched."""
        return self._work.count

    def take_out(self, cause: Cause, *, at_once: bool = False) -> None:
        """Take the worker out of service; no effect if it is for this cause.

        ``at_once``: new requests are refused now, not only after the propagation.
        """
        self._conditions[cause].set()
        if at_once:
            self._refuse()
        elif self._timer is None and not self._refusing.is_set():
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._propagation_s, self._refuse)

    def put_back(self, cause: Cause) -> None:
        """Clear a cause; without any the worker is back in service."""
        if not any(c.holds for name, c in self._conditions.items() if name is not cause):
            self._cancel_timer()
            self._refusing.clear()
            self._work.paused = False
        self._conditions[cause].clear()  # last: health must not be SERVING while it refuses

    @contextmanager
    def out_for(self, cause: Cause) -> Iterator[None]:
        """Take the worker out of service during a ``with`` block."""
        self.take_out(cause)
        try:
            yield
        finally:
            self.put_back(cause)

    async def until_idle(self, limit_s: float | None, *, for_engine: bool = True) -> None:
        """Wait until new requests are refused and no request is open.

        ``limit_s`` counts from the refusals on; None: no limit. ``for_engine``: a paused engine
        would never be idle while requests are open, so don't wait for it.

        Raises:
            DeadlinePassedError: requests are still open.
            OperationConflictError: they are paused.
        """
        if for_engine:
            self._check_not_paused()
        await self._refusing.wait()
        if for_engine:
            self._check_not_paused()
        if not await self._work.until_idle(limit_s):
            raise DeadlinePassedError(
                f"requests still open after {limit_s:g} s: {self._work.count}; give a longer "
                "timeout"
            )
        if for_engine:
            await self.until_no_probe()

    async def until_no_probe(self) -> None:
        """Wait until no probe of the canary is in the engine, which must not change with one.

        It stays so if the caller then changes the engine without waiting for anything else.
        """
        await self._silence.until_no_probe()

    def _check_not_paused(self) -> None:
        if self.holds(Cause.PAUSED) and self._work.count:
            raise OperationConflictError(
                "the engine is paused, and this would wait for its open requests "
                f"({self._work.count}); call Continue first"
            )

    def _refuse(self) -> None:
        self._cancel_timer()
        self._work.paused = True
        self._refusing.set()

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
