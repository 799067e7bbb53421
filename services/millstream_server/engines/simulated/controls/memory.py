"""Releasing and resuming the simulated engine's memory."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from millstream_server.control.operations import MemoryTag, MemoryUse
from millstream_server.engines.simulated.rank import Rank
from millstream_server.engines.simulated.state import EngineState
from millstream_server.runtime.errors import EngineBusyError
from millstream_server.runtime.telemetry.counts import resident_bytes


class SimulatedMemory:
    """Satisfies `control.operations.MemoryControl`.

    Releasing the KV cache drops what is cached. There are no weights and no graphs: releasing those
    gives nothing back. While anything is released a request fails with an InternalError, as a bug
    of whoever sent it.
    """

    def __init__(self, state: EngineState, ranks: Sequence[Rank]) -> None:
        """Work on these ranks."""
        self._state = state
        self._ranks = ranks

    async def release_memory(self, tags: Collection[MemoryTag]) -> None:
        """See `MemoryControl.release_memory`.

        Raises:
            EngineBusyError: requests are open.
        """
        if count := sum(rank.open_requests for rank in self._ranks):
            raise EngineBusyError(f"memory can't be released while {count} requests are open")
        self._state.released |= set(tags)
        if MemoryTag.KV_CACHE in tags:
            for rank in self._ranks:
                rank.cache.clear()

    async def resume_memory(self, tags: Collection[MemoryTag]) -> None:
        """See `MemoryControl.resume_memory`."""
        self._state.released -= set(tags)

    async def memory_use(self) -> MemoryUse:
        """Measure this process: the engine runs in it."""
        return MemoryUse(host_bytes=resident_bytes())
