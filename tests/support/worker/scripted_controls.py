"""An engine's controls that do what a test says, and keep the order in which they were called."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from pathlib import Path

from millstream_server.control.engine import Engine
from millstream_server.control.operations import (
    EngineControls,
    LoraAdapter,
    MemoryTag,
    MemoryUse,
    PauseMode,
    ProfileActivity,
    Progress,
    TensorWeights,
    WeightSource,
)

USE = MemoryUse(1000, 50)
LESS = MemoryUse(400, 5)


class ScriptedControls:
    """Satisfies every part of `EngineControls`."""

    def __init__(self, engine: Engine) -> None:
        self.calls: list[str] = []
        """In order; each with what it was given, in short."""
        self.failures: dict[str, BaseException] = {}
        """What a call of that name raises."""
        self.open_at: dict[str, int] = {}
        """Requests in the engine when a call of that name came."""
        self._engine = engine
        self.sources: list[WeightSource] = []
        self.released = False
        self._held: dict[str, asyncio.Event] = {}

    @property
    def all_of_them(self) -> EngineControls:
        return EngineControls(
            memory=self, pause=self, cache=self, weights=self, profile=self, adapters=self
        )

    def hold(self, name: str) -> asyncio.Event:
        """Have the next call of that name wait until the event is set."""
        return self._held.setdefault(name, asyncio.Event())

    async def _called(self, name: str, *given: object) -> None:
        self.calls.append(" ".join([name, *map(str, given)]))
        load = await self._engine.load()
        self.open_at[name] = load.running_requests + load.queued_requests
        if name in self._held:
            await self._held.pop(name).wait()
        if name in self.failures:
            raise self.failures[name]

    # ---- memory

    async def release_memory(self, tags: Collection[MemoryTag]) -> None:
        await self._called("release", *sorted(tag.value for tag in tags))
        self.released = True

    async def resume_memory(self, tags: Collection[MemoryTag]) -> None:
        await self._called("resume", *sorted(tag.value for tag in tags))
        self.released = False

    async def memory_use(self) -> MemoryUse:
        return LESS if self.released else USE

    # ---- pause, cache

    async def pause(self, mode: PauseMode) -> None:
        await self._called("pause", mode.value)

    async def go_on(self) -> None:
        await self._called("go_on")

    async def flush_cache(self) -> None:
        await self._called("flush")

    # ---- weights

    async def check_weights(self, source: WeightSource, progress: Progress) -> None:
        progress(3, 4)
        self.sources.append(source)
        await self._called("check", type(source).__name__)

    async def update_weights(self, source: WeightSource, version: str) -> None:
        await self._called("update", version)

    @property
    def tensors(self) -> dict[str, bytes]:
        """What the last source of tensors had, by name."""
        source = self.sources[-1]
        assert isinstance(source, TensorWeights)
        return {tensor.name: bytes(data) for tensor, data in source.tensors}

    # ---- profiles, adapters

    async def start_profile(
        self, directory: Path, activities: Collection[ProfileActivity], steps: int
    ) -> None:
        await self._called("start_profile", *sorted(a.value for a in activities), steps)
        (directory / "trace.json").write_text("{}")

    async def stop_profile(self) -> None:
        await self._called("stop_profile")

    async def load_adapter(self, name: str, path: Path) -> LoraAdapter:
        await self._called("load_adapter", name)
        return LoraAdapter(name, 8, path)

    async def unload_adapter(self, name: str) -> None:
        await self._called("unload_adapter", name)
