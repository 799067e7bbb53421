"""Giving an engine's memory back, and taking it again."""

from __future__ import annotations

import enum
from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol


class MemoryTag(enum.Enum):
    """A part of an engine's memory; the names are the contract's."""

    KV_CACHE = "kv_cache"
    WEIGHTS = "weights"
    CUDA_GRAPH = "cuda_graph"


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Memory of an engine's processes, measured."""

    host_bytes: int
    """Resident, without counting shared pages twice where the system can tell."""
    device_bytes: int = 0


class MemoryControl(Protocol):
    """All calls come from one event loop, one at a time."""

    async def release_memory(self, tags: Collection[MemoryTag]) -> None:
        """Give memory back. The engine is idle; ``tags`` aren't released yet, and not empty.

        Raises:
            ServingError: it failed; the engine may have failed with it.
        """
        ...

    async def resume_memory(self, tags: Collection[MemoryTag]) -> None:
        """Take memory again, in any order of tags; they are released.

        Raises:
            ServingError: it failed; the engine may have failed with it.
        """
        ...

    async def memory_use(self) -> MemoryUse:
        """Measure the memory of the engine's processes."""
        ...
