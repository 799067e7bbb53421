"""Stops SGLang's steps for a while; empties its prefix cache."""

from __future__ import annotations

import asyncio

from millstream_server.control.operations import PauseMode
from millstream_server.engines.base import Role
from millstream_server.engines.sglang.control.controlled import ControlledEngine
from millstream_server.engines.sglang.requests.gate import Hold
from millstream_server.runtime.errors import UnsupportedFeatureError

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
        """It isn't paused."""
        self._engine = engine

    async def pause(self, mode: PauseMode) -> None:
        """See `PauseControl.pause`."""
        engine = self._engine
        if mode is PauseMode.RETRACT and (why := _NO_RETRACT.get(engine.config.role)):
            raise UnsupportedFeatureError(
                f"This engine can't be paused with RETRACT: {why}. Use IN_PLACE or ABORT."
            )
        engine.runs.gate.close(Hold.PAUSED)
        if mode is PauseMode.ABORT:
            await self._end_all()
            mode = PauseMode.IN_PLACE  # with no request it is only the scheduler that pauses
        message = engine.messages.PauseGenerationReqInput(mode=mode.value)
        await engine.call(engine.manager.pause_generation(message))

    async def _end_all(self) -> None:
        """End all requests, and wait until SGLang has released them."""
        runs = self._engine.runs
        runs.pause_out()
        if tasks := list(runs.tasks()):
            await asyncio.wait(tasks)

    async def go_on(self) -> None:
        """See `PauseControl.go_on`."""
        engine = self._engine
        message = engine.messages.ContinueGenerationReqInput()
        await engine.call(engine.manager.continue_generation(message))
        engine.runs.gate.release(Hold.PAUSED)


class SglangCache:
    """See `control.operations.CacheControl`."""

    def __init__(self, engine: ControlledEngine) -> None:
        """Use a running engine."""
        self._engine = engine

    async def flush_cache(self) -> None:
        """See `CacheControl.flush_cache`."""
        await self._engine.flush_when_idle()
