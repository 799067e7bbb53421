"""Where an engine's requests wait while an operation goes on."""

from __future__ import annotations

import asyncio
import contextlib
import enum
from collections.abc import AsyncIterator


class Hold(enum.Enum):
    """Why requests wait."""

    PAUSED = "paused"
    RELEASED = "memory released"
    UPDATING = "updating weights"
    HANGS = "a test's hang"


class Gate:
    """Open unless something holds it; requests and probes wait in front of it, or in the engine."""

    def __init__(self) -> None:
        self._holds: set[Hold] = set()
        self._open = asyncio.Event()
        self._open.set()

    @property
    def is_open(self) -> bool:
        return not self._holds

    def holds(self, hold: Hold) -> bool:
        return hold in self._holds

    async def passed(self) -> None:
        """Wait until it is open."""
        while self._holds:
            await self._open.wait()

    def close(self, hold: Hold) -> None:
        """Let requests wait; a second time has no effect."""
        self._holds.add(hold)
        self._open.clear()

    def release(self, hold: Hold) -> None:
        self._holds.discard(hold)
        if not self._holds:
            self._open.set()

    @contextlib.asynccontextmanager
    async def closed(self, hold: Hold) -> AsyncIterator[None]:
        """Let requests wait during the ``with`` block."""
        self.close(hold)
        try:
            yield
        finally:
            self.release(hold)
