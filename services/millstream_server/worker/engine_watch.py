"""Acts on the canary: the health condition "stuck", and failing a worker that stays stuck."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from millstream_server.engines.base import Probeable
from millstream_server.runtime.errors import EngineFailedError, ServingError
from millstream_server.runtime.lifecycle.conditions import STUCK, HealthConditions
from millstream_server.runtime.telemetry.log import get_log
from millstream_server.worker.canary import Canary, CanaryTimes
from millstream_server.worker.expected_silence import ExpectedSilence

log = get_log(__name__)


class EngineWatch:
    """Owns the condition `STUCK`: it holds while the canary reports that the engine hangs.

    An engine that stays stuck for ``stuck_limit_s`` (0: no limit) is reported as failed. So is one
    whose canary ends by itself, since a hang would not be detected any more.
    """

    def __init__(
        self,
        conditions: HealthConditions,
        stuck_limit_s: float,
        on_failure: Callable[[ServingError], None],
        expected_silence: ExpectedSilence | None = None,
    ) -> None:
        """Add the condition; ``on_failure`` is called when the engine counts as failed.

        ``expected_silence`` tells when the engine needn't make progress; None: it always must.
        """
        self._conditions = conditions
        self._stuck = conditions.own(STUCK)
        self._stuck_limit_s = stuck_limit_s
        self._on_failure = on_failure
        self._silence = expected_silence
        self._giving_up: asyncio.TimerHandle | None = None

    @contextlib.asynccontextmanager
    async def watching(
        self, engine: Probeable, dp_size: int, times: CanaryTimes
    ) -> AsyncIterator[None]:
        """Run the canary during the ``with`` block; with an interval of 0 run none."""
        if not times.interval_s:
            yield
            return
        running = asyncio.ensure_future(self._canary(engine, dp_size, times).run())
        running.add_done_callback(self._ended)
        try:
            yield
        finally:
            running.cancel()
            self._keep()

    def _canary(self, engine: Probeable, dp_size: int, times: CanaryTimes) -> Canary:
        return Canary(engine, dp_size, self._changed, times, self._silence)

    def _changed(self, healthy: bool) -> None:  # noqa: FBT001 - the canary's callback
        self._stuck.set(holds=not healthy)
        self._keep()
        if not healthy:
            log.phase("stuck: the engine makes no progress")
            if self._stuck_limit_s:
                loop = asyncio.get_running_loop()
                self._giving_up = loop.call_later(self._stuck_limit_s, self._give_up)
        elif self._conditions.serving:
            log.phase("serving")

    def _keep(self) -> None:
        if self._giving_up is not None:
            self._giving_up.cancel()
            self._giving_up = None

    def _give_up(self) -> None:
        silence = self._silence
        if silence is not None and silence.expected():  # whether it is stuck isn't known now
            loop = asyncio.get_running_loop()
            self._giving_up = loop.call_later(self._stuck_limit_s, self._give_up)
            return
        self._on_failure(EngineFailedError(f"it was stuck for {self._stuck_limit_s:g} s"))

    def _ended(self, running: asyncio.Task[None]) -> None:
        if running.cancelled():
            return
        log.error("the canary failed", error=running.exception())
        self._on_failure(EngineFailedError("its canary failed, so a hang would not be detected"))
