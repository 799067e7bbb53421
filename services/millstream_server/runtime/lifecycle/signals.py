"""SIGTERM and SIGINT: how a serving process stops."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from millstream_server.runtime.rpc.server import Server
from millstream_server.runtime.telemetry.log import get_log

log = get_log(__name__)
T = TypeVar("T")

DRAINED, FAILED, CUT_OFF, PORT_FAILED = 0, 1, 3, 4
"""Exit codes of a service; 2 is a wrong setting."""
_STOP_GRACE_S = 0.2
_LAST_FRAMES_S = 0.5
"""After a failure: longest wait until the terminal frames of open requests are sent."""


class Signals:
    """Handles SIGTERM and SIGINT on the running event loop, from its construction on.

    The first signal starts the drain, the second cuts it short.
    """

    def __init__(self) -> None:
        """Install the handlers."""
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._caught)

    def _caught(self) -> None:
        (self.second if self.first.is_set() else self.first).set()

    async def unless(self, work: Coroutine[Any, Any, T]) -> T | None:
        """Run ``work`` until it ends or the first signal comes; None: the signal came first."""
        working = asyncio.ensure_future(work)
        waiting = asyncio.ensure_future(self.first.wait())
        try:
            await asyncio.wait({working, waiting}, return_when=asyncio.FIRST_COMPLETED)
            return working.result() if working.done() else None
        finally:
            waiting.cancel()
            if not working.done():
                working.cancel()
                await asyncio.wait({working})


async def until_signal(
    server: Server,
    signals: Signals,
    drain: Callable[[], Awaitable[bool]],
    failed: asyncio.Future[Any],
) -> int:
    """Serve until the first signal, then drain; or until something fails. Return the exit code.

    ``drain`` returns whether all work ended. A second signal or ``failed`` cuts it short.
    Exit codes: 0 drained, 1 the service failed, 3 requests were cut off, 4 gRPC's port failed.
    """
    waits: list[asyncio.Future[Any]] = [_wait(signals.first), _wait(server.died)]
    await asyncio.wait({*waits, failed}, return_when=asyncio.FIRST_COMPLETED)
    server.begin_drain()
    clean = False
    if failed.done():
        await asyncio.sleep(_LAST_FRAMES_S)
    else:
        log.phase("draining")
        draining, hurry = asyncio.ensure_future(drain()), _wait(signals.second)
        waits += [draining, hurry]
        await asyncio.wait({draining, hurry, failed}, return_when=asyncio.FIRST_COMPLETED)
        clean = draining.done() and draining.result()
    for wait in waits:
        wait.cancel()
    await server.stop(_STOP_GRACE_S)
    log.phase("stopped", clean=clean)
    if failed.done() or server.died.is_set():
        return FAILED if failed.done() else PORT_FAILED
    return DRAINED if clean else CUT_OFF


def _wait(event: asyncio.Event) -> asyncio.Future[Any]:
    return asyncio.ensure_future(event.wait())
