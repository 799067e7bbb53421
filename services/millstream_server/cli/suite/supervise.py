"""Starts a suite's processes, restarts them, drains them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from millstream_server.cli.suite.process import Child

_TICK_S = 0.25
_RESTART_DELAYS_S = (1.0, 2.0, 4.0, 8.0, 10.0)
_STEADY_S = 60.0
"""After serving this long a service's restart back-off is reset."""
_ABANDON_GRACE_S = 5.0
_DRAIN_LIMIT_S = 90.0
"""For hung processes: services end running requests themselves before that (--drain-s)."""


class StartError(Exception):
    """A process ended before the suite served."""

    def __init__(self, child: Child) -> None:
        """Describe how ``child`` ended."""
        super().__init__(f"{child.service.name} {child.ending()}")
        self.child = child


class Suite:
    """A suite's processes, workers first and the Processor last.

    Call `start`, then `watch` until cancelled, then `drain`; or `abandon` after a start that failed
    or was interrupted.
    """

    def __init__(self, children: Sequence[Child], notify: Callable[[str], None]) -> None:
        """``notify`` is called with messages for the user."""
        self._children = tuple(children)
        self._notify = notify

    @property
    def children(self) -> tuple[Child, ...]:
        """The processes, in order."""
        return self._children

    async def start(self, show: Callable[[Sequence[Child]], None]) -> None:
        """Start all at once and wait until all serve; ``show`` is called a few times a second.

        Raises:
            StartError: one of them ended.
        """
        for child in self._children:
            child.log.parent.mkdir(parents=True, exist_ok=True)
            _rotate_log(child.log)
            await child.start()
        while not all(child.serving for child in self._children):
            await asyncio.gather(*(child.check() for child in self._children))
            show(self._children)
            for child in self._children:
                if not child.running:
                    await child.wait()
                    raise StartError(child)
            await asyncio.sleep(_TICK_S)

    async def watch(self) -> None:
        """Restart processes that end, until cancelled."""
        async with asyncio.TaskGroup() as group:
            for child in self._children:
                group.create_task(self._keep_running(child))

    async def _keep_running(self, child: Child) -> None:
        failures = 0
        while True:
            served_since = time.monotonic()
            await child.wait()
            if time.monotonic() - served_since > _STEADY_S:
                failures = 0
            delay_s = _RESTART_DELAYS_S[min(failures, len(_RESTART_DELAYS_S) - 1)]
            failures += 1
            self._report_end(child, f"starting it again in {delay_s:g} s")
            await asyncio.sleep(delay_s)
            await child.start()
            await self._wait_until_serving(child)

    async def _wait_until_serving(self, child: Child) -> None:
        """Wait until it serves or has ended again."""
        while child.running:
            await child.check()
            if child.serving:
                took_s = time.monotonic() - child.started_s
                self._notify(f"{child.service.name} serves again after {took_s:.1f} s")
                return
            await asyncio.sleep(_TICK_S)

    def _report_end(self, child: Child, then: str) -> None:
        self._notify(f"{child.service.name} {child.ending()}; {then}. Last lines of {child.log}:")
        for line in child.tail():
            self._notify(f"  {line}")

    async def drain(self, force: asyncio.Event) -> bool:
        """Let running requests finish: first the Processor, then all workers.

        ``force`` kills the rest. Return whether all ended by themselves.
        """
        *workers, front = self._children
        clean = await self._end([front], force, "waiting for the processor to finish what it runs")
        names = ", ".join(worker.service.name for worker in workers)
        return await self._end(workers, force, f"waiting for {names} to end") and clean

    async def _end(self, children: Sequence[Child], force: asyncio.Event, doing: str) -> bool:
        running = [child for child in children if child.running]
        if not running:
            return True
        if not force.is_set():
            self._notify(f"{doing} (Ctrl-C again kills)")
            for child in running:
                child.terminate()
        ended = asyncio.gather(*(child.wait() for child in running))
        forced = asyncio.ensure_future(force.wait())
        either: list[asyncio.Future[Any]] = [ended, forced]
        await asyncio.wait(either, timeout=_DRAIN_LIMIT_S, return_when=asyncio.FIRST_COMPLETED)
        forced.cancel()
        clean = ended.done()
        for child in running:
            if child.running:
                self._notify(f"killing {child.service.name}")
                child.kill()
        await ended
        return clean

    async def abandon(self) -> None:
        """End a suite that doesn't serve yet: it has no requests, so a short grace is enough."""
        running = [child for child in self._children if child.running]
        for child in running:
            child.terminate()
        ended = asyncio.gather(*(child.wait() for child in running))
        await asyncio.wait([ended], timeout=_ABANDON_GRACE_S)
        for child in running:
            child.kill()
        await ended


def _rotate_log(log: Path) -> None:
    """Rename the last run's log; an older one is replaced."""
    if log.exists():
        log.replace(log.with_suffix(".log.old"))
