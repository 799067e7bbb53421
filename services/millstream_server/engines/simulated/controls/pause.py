"""Pausing the simulated engine, and emptying its prefix cache."""

from __future__ import annotations

from collections.abc import Sequence

from millstream_server.control.operations import PauseMode
from millstream_server.engines.base import Role
from millstream_server.engines.simulated.rank import Rank
from millstream_server.runtime.errors import (
    EngineBusyError,
    UnsupportedFeatureError,
    WorkerPausedError,
)


class SimulatedPause:
    """Satisfies `control.operations.PauseControl`.

    No request leaves the queue while it is paused. A prefill or transfer that is under way goes on
    until its result is there.
    """

    def __init__(self, role: Role, ranks: Sequence[Rank]) -> None:
        """Work on these ranks."""
        self._role = role
        self._ranks = ranks

    async def pause(self, mode: PauseMode) -> None:
        """See `PauseControl.pause`.

        Raises:
            UnsupportedFeatureError: RETRACT on a worker that hands off: the KV that is being
                transferred can't be computed again by one of the two alone.
        """
        if mode is PauseMode.RETRACT and self._role.hands_off:
            raise UnsupportedFeatureError.of(
                "mode",
                f"a {self._role.value} worker can't retract requests of a hand-off; "
                "use IN_PLACE or ABORT",
            )
        for rank in self._ranks:
            rank.gate.set_paused(paused=True)
            if mode is PauseMode.RETRACT:
                rank.retract()
            elif mode is PauseMode.ABORT:
                rank.fail_all(
                    lambda: WorkerPausedError("an operator paused the worker", retry_delay_s=1.0)
                )

    async def go_on(self) -> None:
        """See `PauseControl.go_on`."""
        for rank in self._ranks:
            rank.go_on()


class SimulatedCache:
    """Satisfies `control.operations.CacheControl`."""

    def __init__(self, ranks: Sequence[Rank]) -> None:
        """Work on these ranks."""
        self._ranks = ranks

    async def flush_cache(self) -> None:
        """See `CacheControl.flush_cache`."""
        if count := sum(rank.open_requests for rank in self._ranks):
            raise EngineBusyError(f"the cache can't be emptied while {count} requests are open")
        for rank in self._ranks:
            rank.cache.clear()
