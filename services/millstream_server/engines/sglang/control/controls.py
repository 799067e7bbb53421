"""Puts an SGLang engine's operations together."""

from __future__ import annotations

import asyncio
from pathlib import Path

from millstream_server.control.operations import EngineControls
from millstream_server.engines.sglang.control.adapters import SglangAdapters
from millstream_server.engines.sglang.control.checkpoint import Checkpoint, read_checkpoint
from millstream_server.engines.sglang.control.controlled import ControlledEngine
from millstream_server.engines.sglang.control.memory import SglangMemory
from millstream_server.engines.sglang.control.pause import SglangCache, SglangPause
from millstream_server.engines.sglang.control.profile import SglangProfile
from millstream_server.engines.sglang.control.weights import SglangWeights
from millstream_server.runtime.errors import EngineFailedError, InvalidWeightsError
from millstream_server.runtime.telemetry.log import get_log

log = get_log(__name__)


async def make_controls(engine: ControlledEngine) -> EngineControls:
    """Return what operators can do with an engine that has started.

    Raises:
        EngineFailedError: it takes adapters, but its model has no safetensors files.
    """
    loaded = await _loaded(engine)
    return EngineControls(
        memory=SglangMemory(engine),
        pause=SglangPause(engine),
        cache=SglangCache(engine),
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
