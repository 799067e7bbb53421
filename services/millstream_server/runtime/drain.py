"""Work that is open in a process, and how a process that shuts down sees it out.

The order on SIGTERM, the same for every service (`runtime.server.until_signal`):

1. health turns NOT_SERVING, and whoever holds a long stream is told (`OpenWork.announce`);
2. new work is still taken for ``propagation_s``: load balancers and peers need that long to hear;
3. new work is refused with UNAVAILABLE and RetryInfo (`OpenWork.refuse`);
4. what is open finishes, for at most ``limit_s``;
5. the server stops; what is still open then is cut, with UNAVAILABLE too (`OpenHandlers.cut`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator


class OpenWork:
    """Counts open work; one per process. All calls come from one event loop."""

    def __init__(self) -> None:
        """Start with none."""
        self.count = 0
        self.leaving = False
        """The shutdown was announced; new work is still taken."""
        self.refusing = False
        """New work is refused."""
        self._told: set[Callable[[], None]] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    def begin(self) -> None:
        """Count one more."""
        self.count += 1
        self._idle.clear()

    def end(self) -> None:
        """Count one less."""
        self.count -= 1
        if not self.count:
            self._idle.set()

    @contextlib.contextmanager
    def track(self) -> Iterator[None]:
        """Count what happens within."""
        self.begin()
        try:
            yield
        finally:
            self.end()

    def when_leaving(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Have ``callback`` called when the shutdown is announced, or now; answers the undo."""
        if self.leaving:
            callback()
        self._told.add(callback)
        return lambda: self._told.discard(callback)

    async def drain(self, propagation_s: float, limit_s: float) -> bool:
        """See the work out; answers whether all of it ended in time."""
        self.leaving = True
        for callback in list(self._told):
            callback()
        await asyncio.sleep(propagation_s)
        self.refusing = True
        return await self.until_idle(limit_s)

    async def until_idle(self, limit_s: float) -> bool:
        """Wait until nothing is open; answers whether that came in time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while self.count:  # one may begin in the turn in which the last one ended
                    await self._idle.wait()
        return not self.count


class OpenHandlers(OpenWork):
    """A server's RPC handlers that run, known by their tasks."""

    def __init__(self) -> None:
        """Start with none."""
        super().__init__()
        self.cutting = False
        """Handlers that are cancelled now are by `cut`, not by their callers."""
        self.sending: set[asyncio.Task[object] | None] = set()
        """Those whose answer gRPC is sending; cancelled there, they wouldn't hear of it in time."""
        self._tasks: set[asyncio.Task[object] | None] = set()

    @contextlib.contextmanager
    def track(self) -> Iterator[None]:
        """Count this task's handler while it runs."""
        task = asyncio.current_task()
        with super().track():
            self._tasks.add(task)
            try:
                yield
            finally:
                self._tasks.discard(task)

    def cut(self) -> None:
        """Cancel what runs: cut by gRPC, a caller would get a status without our details.

        Those in `sending` look at `cutting` themselves when they go on.
        """
        self.cutting = True
        for task in tuple(self._tasks):
            if task is not None and task not in self.sending:
                task.cancel()
