"""Gives SGLang's memory back and takes it again."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

from millstream_server.control.memory import MemoryTag, MemoryUse
from millstream_server.engines.sglang.control.controlled import ControlledEngine
from millstream_server.engines.sglang.control.memory_use import measure
from millstream_server.engines.sglang.requests.gate import Hold


class SglangMemory:
    """See `control.memory.MemoryControl`.

    SGLang's scheduler ends when it has a request left as memory is released, and would run requests
    on memory that is. So it is asked first whether it is idle, and requests wait at the gate from
    before that until everything is resumed. Memory falls only with `--enable-memory-saver`, on a
    GPU; otherwise SGLang empties its prefix cache, and `memory_use` shows that nothing was freed.
    """

    def __init__(self, engine: ControlledEngine) -> None:
        """Nothing is released."""
        self._engine = engine
        self._released: set[MemoryTag] = set()

    async def release_memory(self, tags: Collection[MemoryTag]) -> None:
        """See `MemoryControl.release_memory`."""
        engine = self._engine
        engine.runs.gate.close(Hold.RELEASED)
        try:
            await engine.flush_when_idle()
        except BaseException:
            self._open_gate()
            raise
        message = engine.messages.ReleaseMemoryOccupationReqInput(tags=_names(tags))
        self._released |= set(tags)
        await engine.call(engine.manager.release_memory_occupation(message))

    async def resume_memory(self, tags: Collection[MemoryTag]) -> None:
        """See `MemoryControl.resume_memory`."""
        engine = self._engine
        message = engine.messages.ResumeMemoryOccupationReqInput(tags=_names(tags))
        await engine.call(engine.manager.resume_memory_occupation(message))
        self._released -= set(tags)
        self._open_gate()

    def _open_gate(self) -> None:
        if not self._released:
            self._engine.runs.gate.release(Hold.RELEASED)

    async def memory_use(self) -> MemoryUse:
        """See `MemoryControl.memory_use`."""
        pids = self._engine.built.engine.get_all_child_pids()
        on_gpu = self._engine.config.resolved_device() == "cuda"
        return await asyncio.to_thread(measure, pids, on_gpu=on_gpu)


def _names(tags: Collection[MemoryTag]) -> list[str]:
    """Name them as SGLang does, in its order."""
    return [tag.value for tag in MemoryTag if tag in tags]
