"""When an engine is expected to make no progress: operators change it, or have paused it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from millstream_server.runtime.lifecycle.drain import OpenWork


class ExpectedSilence:
    """Tells the canary when not to probe; tells operations when no probe runs.

    All calls come from one event loop.
    """

    def __init__(self) -> None:
        """Start with an engine that must make progress."""
        self.expected: Callable[[], bool] = lambda: False
        """Returns whether the engine makes no progress because an operator wanted that."""
        self.probes = OpenWork()
        """Counts the canary's probes in the engine."""
        self._held_off = 0

    @property
    def probes_wanted(self) -> bool:
        """Whether the canary may run a new probe."""
        return not (self._held_off or self.expected())

    @contextlib.contextmanager
    def without_new_probes(self) -> Iterator[None]:
        """Have the canary run no new probe during a ``with`` block."""
        self._held_off += 1
        try:
            yield
        finally:
            self._held_off -= 1

    async def until_no_probe(self) -> None:
        """Wait until no probe is in the engine, which takes as long as the canary gives it.

        There is none until the caller waits for something else.
        """
        with self.without_new_probes():
            await self.probes.until_idle(None)
