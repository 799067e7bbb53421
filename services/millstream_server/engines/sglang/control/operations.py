"""What operators can do with an SGLang engine: memory, pause, cache, profile; all put together."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from pathlib import Path

from millstream_server.control.engine import Role
from millstream_server.control.operations import (
    EngineControls,
    MemoryTag,
    MemoryUse,
    PauseMode,
    ProfileActivity,
)
from millstream_server.engines.checkpoint import Checkpoint, read_checkpoint
from millstream_server.engines.gate import Hold
from millstream_server.engines.operations import measure
from millstream_server.engines.sglang.control.adapters import SglangAdapters
from millstream_server.engines.sglang.control.controlled import ControlledEngine
from millstream_server.engines.sglang.control.weights import SglangWeights
from millstream_server.runtime.errors import (
    EngineFailedError,
    InternalError,
    InvalidWeightsError,
    OperationConflictError,
    UnsupportedFeatureError,
)
from millstream_server.runtime.telemetry.log import get_log

log = get_log(__name__)


class SglangMemory:
    """See `control.operations.MemoryControl`.

    SGLang's scheduler ends when it has a request left as memory is released, and would run requests
    on memory that is. So it is asked first whether it is idle, and requests wait at the gate from
    before that until everything is resumed. Memory falls only with `--enable-memory-saver`, on a
    GPU; otherwise SGLang empties its prefix cache, and `memory_use` shows that nothing was freed.
    """

    def __init__(self, engine: ControlledEngine) -> None:
        self._engine = engine
        self._released: set[MemoryTag] = set()

    async def release_memory(self, tags: Collection[MemoryTag]) -> None:
        engine = self._engine
        engine.runs.gate.close(Hold.RELEASED)
        try:
            await engine.flush_cache()
        except BaseException:
            self._open_gate()
            raise
        message = engine.messages.ReleaseMemoryOccupationReqInput(tags=_names(tags))
        self._released |= set(tags)
        await engine.call(engine.manager.release_memory_occupation(message))

    async def resume_memory(self, tags: Collection[MemoryTag]) -> None:
        engine = self._engine
        message = engine.messages.ResumeMemoryOccupationReqInput(tags=_names(tags))
        await engine.call(engine.manager.resume_memory_occupation(message))
        self._released -= set(tags)
        self._open_gate()

    def _open_gate(self) -> None:
        if not self._released:
            self._engine.runs.gate.release(Hold.RELEASED)

    async def memory_use(self) -> MemoryUse:
        pids = self._engine.built.engine.get_all_child_pids()
        on_gpu = self._engine.config.resolved_device() == "cuda"
        return await asyncio.to_thread(measure, pids, on_gpu=on_gpu)


def _names(tags: Collection[MemoryTag]) -> list[str]:
    """Name them as SGLang does, in its order."""
    return [tag.value for tag in MemoryTag if tag in tags]


_NO_RETRACT = {
    Role.DIFFUSION: "a diffusion language model can't take up a block again",
    Role.PREFILL: "a prefill engine has sent parts of the KV cache already",
    Role.DECODE: "the prefill engine doesn't have the requests' KV cache any more",
}


class SglangPause:
    """See `control.operations.PauseControl`.

    New requests wait at the gate, not in SGLang's own pause, where an abort wouldn't find them.
    """

    def __init__(self, engine: ControlledEngine) -> None:
        self._engine = engine

    async def pause(self, mode: PauseMode) -> None:
        engine = self._engine
        if mode is PauseMode.RETRACT and (why := _NO_RETRACT.get(engine.config.role)):
            raise UnsupportedFeatureError(
                f"This engine can't be paused with RETRACT: {why}. Use IN_PLACE or ABORT."
            )
        engine.runs.gate.close(Hold.PAUSED)
        if mode is PauseMode.ABORT:
            engine.runs.pause_out()
            if tasks := list(engine.runs.tasks()):
                await asyncio.wait(tasks)  # until SGLang has released them
            mode = PauseMode.IN_PLACE  # with no request it is only the scheduler that pauses
        message = engine.messages.PauseGenerationReqInput(mode=mode.value)
        await engine.call(engine.manager.pause_generation(message))

    async def go_on(self) -> None:
        engine = self._engine
        message = engine.messages.ContinueGenerationReqInput()
        await engine.call(engine.manager.continue_generation(message))
        engine.runs.gate.release(Hold.PAUSED)


_NAMES = {
    ProfileActivity.CPU: "CPU",
    ProfileActivity.GPU: "GPU",
    ProfileActivity.MEMORY: "MEM",
}
_IN_PROGRESS = "already in progress"
_NOT_IN_PROGRESS = "not in progress"
"""In SGLang's messages; a test compares them."""


class SglangProfile:
    """See `control.operations.ProfileControl`."""

    def __init__(self, engine: ControlledEngine) -> None:
        self._engine = engine

    async def start_profile(
        self, directory: Path, activities: Collection[ProfileActivity], steps: int
    ) -> None:
        engine = self._engine
        on_gpu = engine.config.resolved_device() == "cuda"
        if not on_gpu and (wrong := set(activities) - {ProfileActivity.CPU}):
            names = ", ".join(sorted(activity.value for activity in wrong))
            raise UnsupportedFeatureError(
                f"This engine runs on a CPU and can't record {names}; it records cpu."
            )
        chosen = list(activities) or [ProfileActivity.CPU, *([ProfileActivity.GPU] * on_gpu)]
        message = engine.messages.ProfileReq(
            output_dir=str(directory),
            activities=[_NAMES[activity] for activity in chosen],
            num_steps=steps or None,
            profile_prefix="sglang",
        )
        try:
            await engine.call(engine.manager.start_profile(message))
        except RuntimeError as error:
            if _IN_PROGRESS in str(error):
                raise OperationConflictError("A profile is being recorded already.") from error
            raise _failed(error) from error

    async def stop_profile(self) -> None:
        engine = self._engine
        try:
            await engine.call(engine.manager.stop_profile())
        except RuntimeError as error:
            if _NOT_IN_PROGRESS not in str(error):  # it has stopped by itself
                raise _failed(error) from error


def _failed(error: RuntimeError) -> InternalError:
    log.error("SGLang's profiler failed", error=error)
    return InternalError("The engine's profiler failed; the worker's log has the cause.")


async def make_controls(engine: ControlledEngine) -> EngineControls:
    """Return what operators can do with an engine that has started.

    Raises:
        EngineFailedError: it takes adapters, but its model has no safetensors files.
    """
    loaded = await _loaded(engine)
    return EngineControls(
        memory=SglangMemory(engine),
        pause=SglangPause(engine),
        cache=engine,
        weights=None if loaded is None else SglangWeights(engine, loaded),
        profile=SglangProfile(engine),
        adapters=SglangAdapters(engine, loaded) if loaded and engine.info.takes_adapters else None,
    )


async def _loaded(engine: ControlledEngine) -> Checkpoint | None:
    """Read what new weights and adapters are compared with."""
    try:
        return await asyncio.to_thread(read_checkpoint, Path(engine.config.model_path))
    except InvalidWeightsError as error:
        if engine.info.takes_adapters:
            message = f"Adapters can't be checked against this model. {error.message}"
            raise EngineFailedError(message) from error
        log.warning("weights and adapters can't be loaded at runtime", reason=error.message)
        return None
