"""Detects a peer that has stopped reporting."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class SilenceAlarm:
    """Calls ``on_silent`` when `restart` wasn't called for ``limit_s`` seconds."""

    def __init__(self, limit_s: float, on_silent: Callable[[], None]) -> None:
        """Prepare; `restart` starts the timer."""
        self._limit_s = limit_s
        self._on_silent = on_silent
        self._timer: asyncio.TimerHandle | None = None

    def restart(self) -> None:
        """Restart the timer: a report came, or reports are expected from now on."""
        self.stop()
        self._timer = asyncio.get_running_loop().call_later(self._limit_s, self._on_silent)

    def stop(self) -> None:
        """Stop the timer."""
        if self._timer:
            self._timer.cancel()
            self._timer = None
