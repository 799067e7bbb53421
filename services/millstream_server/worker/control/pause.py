"""Pause, Continue and FlushCache."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from millstream_server.control.operations import CacheControl, PauseControl, PauseMode
from millstream_server.runtime.errors import EngineBusyError, OperationConflictError
from millstream_server.runtime.telemetry.log import get_log
from millstream_server.worker.control.operations import Operations, Stage, to_its_end
from millstream_server.worker.control.service_stop import Cause, ServiceStop
from millstream_server.worker.control.supported import SupportedControls

log = get_log(__name__)


@dataclass(frozen=True, slots=True)
class Paused:
    """What a pause did."""

    was_paused: bool
    open_requests: int


class PauseOperations:
    """Pauses the engine and lets it go on."""

    def __init__(
        self, operations: Operations, stop: ServiceStop, controls: SupportedControls
    ) -> None:
        """Start with an engine that isn't paused."""
        self._operations = operations
        self._stop = stop
        self._controls = controls
        self._turn = asyncio.Lock()
        """Pause and Continue wait for each other."""
        self._going_on: set[asyncio.Task[bool]] = set()

    @property
    def paused(self) -> bool:
        """Whether the engine is paused, or about to be."""
        return self._stop.holds(Cause.PAUSED)

    async def pause(self, mode: PauseMode) -> Paused:
        """Stop the engine's steps; no effect when it is paused.

        New requests are accepted until routers have noticed, and wait; with ABORT they are refused
        at once.

        Raises:
            UnsupportedFeatureError: the engine can't, or not in this mode.
            OperationConflictError: another operation runs, or memory is released.
        """
        control: PauseControl = self._controls.require("Pause", lambda c: c.pause)
        open_requests = self._stop.open_requests
        if self.paused and not self._turn.locked():
            return Paused(was_paused=True, open_requests=open_requests)
        with self._operations.one("Pause") as operation:
            if self._stop.holds(Cause.MEMORY):
                raise OperationConflictError(
                    "memory of the engine is released, so it runs nothing; call ResumeMemory first"
                )
            async with self._turn:
                self._stop.take_out(Cause.PAUSED, at_once=mode is PauseMode.ABORT)
                try:
                    await operation.apply(control.pause(mode))
                except BaseException:
                    self._stop.put_back(Cause.PAUSED)
                    raise
        return Paused(was_paused=False, open_requests=open_requests)

    async def go_on(self) -> bool:
        """Let the engine's steps go on; return whether it was paused.

        It runs also while another operation does, whose requests may be the paused ones. Once
        begun it is finished, whether or not its caller is still there.

        Raises:
            UnsupportedFeatureError: the engine can't pause.
        """
        control: PauseControl = self._controls.require("Continue", lambda c: c.pause)
        return await to_its_end(self._start_going_on(control))

    def leave(self) -> None:
        """Let a paused engine go on: the worker is shutting down, and its requests may end."""
        if self.paused:
            control: PauseControl = self._controls.require("Continue", lambda c: c.pause)
            self._start_going_on(control).add_done_callback(_log_failure)

    def _start_going_on(self, control: PauseControl) -> asyncio.Task[bool]:
        going = asyncio.create_task(self._go_on(control))
        self._going_on.add(going)
        going.add_done_callback(self._going_on.discard)
        return going

    async def _go_on(self, control: PauseControl) -> bool:
        with self._operations.busy.track():
            async with self._turn:
                if not self.paused:
                    return False
                await control.go_on()
                self._stop.put_back(Cause.PAUSED)
                return True


def _log_failure(going: asyncio.Task[bool]) -> None:
    if not going.cancelled() and (error := going.exception()) is not None:
        log.error("the paused engine can't go on", error=error)


class CacheOperations:
    """Empties the prefix cache."""

    def __init__(
        self, operations: Operations, stop: ServiceStop, controls: SupportedControls
    ) -> None:
        """Flush nothing yet."""
        self._operations = operations
        self._stop = stop
        self._controls = controls

    async def flush(self, *, drain: bool, timeout_s: float | None) -> None:
        """Empty the prefix cache; with ``drain`` out of service, once no request is open.

        Raises:
            EngineBusyError: without ``drain``, requests are open.
            DeadlinePassedError: with it, they still are; the worker is back in service.
            OperationConflictError: another operation runs, or memory is released.
            UnsupportedFeatureError: the engine can't.
        """
        control: CacheControl = self._controls.require("FlushCache", lambda c: c.cache)
        with self._operations.one("FlushCache") as operation:
            if self._stop.holds(Cause.MEMORY):
                raise OperationConflictError(
                    "memory of the engine is released; call ResumeMemory first"
                )
            if not drain:
                if count := self._stop.open_requests:
                    raise EngineBusyError(
                        f"requests are open: {count}; set `drain` to wait for them out of service"
                    )
                await self._stop.until_no_probe()
                await operation.apply(control.flush_cache())
                return
            with self._stop.out_for(Cause.CACHE):
                operation.report.enter(Stage.DRAINING)
                await self._stop.until_idle(timeout_s)
                await operation.apply(control.flush_cache())
