"""Open work of a process, and how the process waits for it when it shuts down.

The order on SIGTERM, the same for every service (`runtime.lifecycle.main.until_signal`):

1. health becomes NOT_SERVING; peers with long streams are notified (`OpenWork.when_leaving`), and
   clients of HTTP/1.1 by each response;
2. new work is still accepted for ``propagation_s``, until load balancers and peers have noticed;
3. a Processor sends GOAWAY on all connections and takes no new ones; RPCs that are under way are
   served, and whoever hasn't been told (`Server.stop_accepting`);
4. new work is refused with UNAVAILABLE and RetryInfo (`OpenWork.refusing`);
5. open work may finish, for at most ``limit_s`` since 3;
6. the server stops; RPCs still open end with UNAVAILABLE (`OpenCalls.cut`).

Apart from that, an operator may stop new work for a while (`OpenWork.paused`): long streams aren't
notified; open work and a shutdown go on as usual.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator

from millstream_server.runtime.errors import WorkerPausedError

_PAUSED_S = 1.0


class OpenWork:
    """Counts open work; one per process. All calls come from one event loop."""

    def __init__(self) -> None:
        self.count = 0
        self.leaving = False
        """The shutdown was announced; new work is still accepted."""
        self.refusing = False
        """New work is refused."""
        self.paused = False
        """New work is refused for a while: an operator took the process out of service."""
        self._told: set[Callable[[], None] | None] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    def begin(self, on_leaving: Callable[[], None] | None = None) -> None:
        """Count one more; call ``on_leaving`` when the shutdown is announced, or was already."""
        self.count += 1
        if self.count == 1:
            self._idle.clear()
        if on_leaving is not None:
            self._told.add(on_leaving)
            if self.leaving:
                on_leaving()

    def end(self, on_leaving: Callable[[], None] | None = None) -> None:
        """Count one less, and forget ``on_leaving``."""
        self._told.discard(on_leaving)
        self.count -= 1
        if not self.count:
            self._idle.set()

    @contextlib.contextmanager
    def track(self) -> Iterator[None]:
        self.begin()
        try:
            yield
        finally:
            self.end()

    def check_in_service(self) -> None:
        """Check that no operator has taken the process out of service.

        Raises:
            WorkerPausedError: one has.
        """
        if self.paused:
            raise WorkerPausedError(
                "an operator took this worker out of service for a while; retry on another one",
                retry_delay_s=_PAUSED_S,
            )

    def when_leaving(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call ``callback`` when the shutdown is announced; return the function that undoes this.

        If the shutdown was announced already, ``callback`` is called at once.
        """
        if self.leaving:
            callback()
        self._told.add(callback)
        return lambda: self._told.discard(callback)

    async def drain(
        self,
        propagation_s: float,
        limit_s: float,
        stop_accepting: Callable[[], Awaitable[None]] | None = None,
    ) -> bool:
        """Announce the shutdown, then wait; return whether all work ended in time.

        ``stop_accepting`` returns when no caller sends new RPCs any more.
        """
        self.leaving = True
        for callback in filter(None, list(self._told)):
            callback()
        await asyncio.sleep(propagation_s)
        loop = asyncio.get_running_loop()
        until_s = loop.time() + limit_s
        if stop_accepting is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(limit_s):
                    await stop_accepting()
        self.refusing = True
        return await self.until_idle(until_s - loop.time())

    async def until_idle(self, limit_s: float | None) -> bool:
        """Wait up to ``limit_s``, None: for ever, until no work is open; return whether none is."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while self.count:  # work may begin in the loop iteration in which the last ended
                    await self._idle.wait()
        return not self.count
