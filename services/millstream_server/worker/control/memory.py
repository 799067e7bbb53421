"""ReleaseMemory and ResumeMemory."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from millstream_server.control.operations import MemoryControl, MemoryTag, MemoryUse
from millstream_server.worker.control.operations import Operations, Report, Stage
from millstream_server.worker.control.service_stop import Cause, ServiceStop
from millstream_server.worker.control.supported import REFUSALS, SupportedControls

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


class MemoryOperations:
    """Gives memory back and takes it again; the worker is out of service in between."""

    def __init__(
        self, operations: Operations, stop: ServiceStop, controls: SupportedControls
    ) -> None:
        """Start with nothing released."""
        self._operations = operations
        self._stop = stop
        self._controls = controls
        self.released: frozenset[MemoryTag] = frozenset()

    async def release(
        self, report: Report, tags: Collection[MemoryTag], timeout_s: float | None
    ) -> Released:
        """Release memory once no request is open; empty ``tags``: all.

        Raises:
            DeadlinePassedError: requests are still open; it is as before.
            OperationConflictError: another operation runs, or the open requests are paused.
            UnsupportedFeatureError: the engine can't.
            ServingError: the engine failed to; the worker stays out of service until it can resume.
        """
        control: MemoryControl = self._controls.require("ReleaseMemory", lambda c: c.memory)
        with self._operations.one("ReleaseMemory", report) as operation:
            wanted = frozenset(tags) or _ALL
            already, fresh = wanted & self.released, wanted - self.released
            if not fresh:
                use = await control.memory_use()
                return Released(released=self.released, already=already, before=use, after=use)
            self._stop.take_out(Cause.MEMORY)
            try:
                report.enter(Stage.DRAINING)
                await self._stop.until_idle(timeout_s)
                before, after = await operation.apply(self._release(control, fresh))
            finally:
                if not self.released:
                    self._stop.put_back(Cause.MEMORY)
            return Released(released=self.released, already=already, before=before, after=after)

    async def resume(self, tags: Collection[MemoryTag]) -> Resumed:
        """Take memory again; empty ``tags``: all that is released.

        Raises:
            OperationConflictError: another operation runs.
            UnsupportedFeatureError: the engine can't release memory.
            ServingError: the engine failed to; it stays released.
        """
        control: MemoryControl = self._controls.require("ResumeMemory", lambda c: c.memory)
        with self._operations.one("ResumeMemory") as operation:
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
                self._stop.put_back(Cause.MEMORY)
        return await control.memory_use()
