"""Drain, Undrain, Pause, Continue, FlushCache, ReleaseMemory and ResumeMemory."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import dataclass, field

from millstream_server.control.operations import (
    CacheControl,
    MemoryControl,
    MemoryTag,
    MemoryUse,
    PauseControl,
    PauseMode,
)
from millstream_server.runtime.errors import (
    DeadlinePassedError,
    EngineBusyError,
    OperationConflictError,
)
from millstream_server.runtime.telemetry.log import get_log
from millstream_server.worker.control.operations import (
    REFUSALS,
    Cause,
    OperationKind,
    OperationReport,
    OperationStage,
    to_its_end,
)

log = get_log(__name__)

_NAME = "Drain"


@dataclass(slots=True, eq=False)
class DrainOperations(OperationKind):
    """Takes the worker out of service, and back. It needs no controls of the engine."""

    _waiting: int = 0
    _settled: bool = False
    """Whether it stays drained without a caller who waits."""

    async def drain(self, report: OperationReport, timeout_s: float | None) -> None:
        """Take the worker out of service and wait until no request is open.

        If the last caller goes away before, it is back in service.

        Raises:
            DeadlinePassedError: requests are still open; it stays out of service.
            OperationConflictError: another operation runs, or `undrain` was called.
        """
        with self.operations.one(_NAME, report, together=True):
            self.stop.take_out(Cause.DRAINED)
            report.enter(OperationStage.DRAINING)
            self._waiting += 1
            try:
                await self.stop.until_idle(timeout_s, for_engine=False)
                self._settled = True
            except DeadlinePassedError:
                self._settled = True
                raise
            finally:
                self._waiting -= 1
                if not (self._settled or self._waiting):
                    self.stop.put_back(Cause.DRAINED)

    def undrain(self) -> bool:
        """Put the worker back into service; return whether it was drained."""
        was_drained = self.stop.holds(Cause.DRAINED)
        self._settled = False
        self.stop.put_back(Cause.DRAINED)
        self.operations.interrupt(
            _NAME, OperationConflictError("Undrain has put the worker back into service")
        )
        return was_drained


@dataclass(slots=True, eq=False)
class PauseOperations(OperationKind):
    """Pauses the engine and lets it go on."""

    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Pause and Continue wait for each other."""
    _going_on: set[asyncio.Task[bool]] = field(default_factory=set)

    @property
    def paused(self) -> bool:
        """Whether the engine is paused, or about to be."""
        return self.stop.holds(Cause.PAUSED)

    async def pause(self, mode: PauseMode) -> tuple[bool, int]:
        """Stop the engine's steps; return whether it was paused, and the requests that are open.

        New requests are accepted until routers have noticed, and wait; with ABORT they are refused
        at once.

        Raises:
            UnsupportedFeatureError: the engine can't, or not in this mode.
            OperationConflictError: another operation runs, or memory is released.
        """
        control: PauseControl = self.controls.require("Pause", lambda c: c.pause)
        open_requests = self.stop.open_requests
        if self.paused and not self._turn.locked():
            return True, open_requests
        with self.operations.one("Pause") as operation:
            if self.stop.holds(Cause.MEMORY):
                raise OperationConflictError(
                    "memory of the engine is released, so it runs nothing; call ResumeMemory first"
                )
            async with self._turn:
                self.stop.take_out(Cause.PAUSED, at_once=mode is PauseMode.ABORT)
                try:
                    await operation.apply(control.pause(mode))
                except BaseException:
                    self.stop.put_back(Cause.PAUSED)
                    raise
        return False, open_requests

    async def go_on(self) -> bool:
        """Let the engine's steps go on; return whether it was paused.

        It runs also while another operation does, whose requests may be the paused ones. Once
        begun it is finished, whether or not its caller is still there.
        """
        control: PauseControl = self.controls.require("Continue", lambda c: c.pause)
        return await to_its_end(self._start_going_on(control))

    def leave(self) -> None:
        """Let a paused engine go on: the worker is shutting down, and its requests may end."""
        if self.paused:
            control: PauseControl = self.controls.require("Continue", lambda c: c.pause)
            self._start_going_on(control).add_done_callback(_log_failure)

    def _start_going_on(self, control: PauseControl) -> asyncio.Task[bool]:
        going = asyncio.create_task(self._go_on(control))
        self._going_on.add(going)
        going.add_done_callback(self._going_on.discard)
        return going

    async def _go_on(self, control: PauseControl) -> bool:
        with self.operations.busy.track():
            async with self._turn:
                if not self.paused:
                    return False
                await control.go_on()
                self.stop.put_back(Cause.PAUSED)
                return True


def _log_failure(going: asyncio.Task[bool]) -> None:
    if not going.cancelled() and (error := going.exception()) is not None:
        log.error("the paused engine can't go on", error=error)


class CacheOperations(OperationKind):
    """Empties the prefix cache."""

    async def flush(self, *, drain: bool, timeout_s: float | None) -> None:
        """Empty the prefix cache; with ``drain`` out of service, once no request is open.

        Raises:
            EngineBusyError: without ``drain``, requests are open.
            DeadlinePassedError: with it, they still are; the worker is back in service.
            OperationConflictError: another operation runs, or memory is released.
        """
        control: CacheControl = self.controls.require("FlushCache", lambda c: c.cache)
        with self.operations.one("FlushCache") as operation:
            self.stop.check_has_memory()
            if not drain:
                if count := self.stop.open_requests:
                    raise EngineBusyError(
                        f"requests are open: {count}; set `drain` to wait for them out of service"
                    )
                await self.stop.until_no_probe()
                await operation.apply(control.flush_cache())
                return
            with self.stop.out_for(Cause.CACHE):
                operation.report.enter(OperationStage.DRAINING)
                await self.stop.until_idle(timeout_s)
                await operation.apply(control.flush_cache())


_ALL = frozenset(MemoryTag)


@dataclass(frozen=True, slots=True, kw_only=True)
class Released:
    """What a release did."""

    released: frozenset[MemoryTag]
    """By this call and earlier ones."""
    already: frozenset[MemoryTag]
    """Of those that were asked for."""
    before: MemoryUse
    after: MemoryUse


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """What a resume did."""

    resumed: frozenset[MemoryTag]
    released: frozenset[MemoryTag]
    """What still is."""
    after: MemoryUse


@dataclass(slots=True, eq=False)
class MemoryOperations(OperationKind):
    """Gives memory back and takes it again; the worker is out of service in between."""

    released: frozenset[MemoryTag] = frozenset()

    async def release(
        self, report: OperationReport, tags: Collection[MemoryTag], timeout_s: float | None
    ) -> Released:
        """Release memory once no request is open; empty ``tags``: all.

        Raises:
            DeadlinePassedError: requests are still open; it is as before.
            OperationConflictError: another operation runs, or the open requests are paused.
            ServingError: the engine failed to; the worker stays out of service until it can resume.
        """
        control: MemoryControl = self.controls.require("ReleaseMemory", lambda c: c.memory)
        with self.operations.one("ReleaseMemory", report) as operation:
            wanted = frozenset(tags) or _ALL
            already, fresh = wanted & self.released, wanted - self.released
            if not fresh:
                use = await control.memory_use()
                return Released(released=self.released, already=already, before=use, after=use)
            self.stop.take_out(Cause.MEMORY)
            try:
                report.enter(OperationStage.DRAINING)
                await self.stop.until_idle(timeout_s)
                before, after = await operation.apply(self._release(control, fresh))
            finally:
                if not self.released:
                    self.stop.put_back(Cause.MEMORY)
            return Released(released=self.released, already=already, before=before, after=after)

    async def resume(self, tags: Collection[MemoryTag]) -> Resumed:
        """Take memory again; empty ``tags``: all that is released.

        Raises:
            ServingError: the engine failed to; it stays released.
        """
        control: MemoryControl = self.controls.require("ResumeMemory", lambda c: c.memory)
        with self.operations.one("ResumeMemory") as operation:
            resumed = frozenset(tags or _ALL) & self.released
            after = await operation.apply(self._resume(control, resumed))
            return Resumed(resumed=resumed, released=self.released, after=after)

    async def _release(
        self, control: MemoryControl, fresh: frozenset[MemoryTag]
    ) -> tuple[MemoryUse, MemoryUse]:
        before = await control.memory_use()
        try:
            await control.release_memory(fresh)
        except REFUSALS:
            raise  # refused: nothing is released
        except BaseException:
            self.released |= fresh  # a part of it may be
            raise
        self.released |= fresh
        return before, await control.memory_use()

    async def _resume(self, control: MemoryControl, tags: frozenset[MemoryTag]) -> MemoryUse:
        if tags:
            await control.resume_memory(tags)
            self.released -= tags
            if not self.released:
                self.stop.put_back(Cause.MEMORY)
        return await control.memory_use()
