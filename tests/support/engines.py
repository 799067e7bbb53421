"""The engines that the conformance suite runs over.

Each entry makes a running engine and takes it down again. To add one, append a `pytest.param` to
`ENGINES`, with the marker of what it takes to run: `marks=pytest.mark.sglang`.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

import pytest

from millstream_server.engines.base import Engine, EngineInfo
from millstream_server.engines.simulated import SimulatedConfig, SimulatedEngine


@dataclass(frozen=True)
class RunningEngine:
    """A started and warm engine. Its model must be able to answer 200 tokens to a short prompt."""

    engine: Engine
    info: EngineInfo


EngineFactory = Callable[[], AbstractAsyncContextManager[RunningEngine]]


@contextlib.asynccontextmanager
async def simulated() -> AsyncIterator[RunningEngine]:
    """Eight at once, with steps slow enough to come in between."""
    engine = SimulatedEngine(
        SimulatedConfig(
            vocab_size=500,
            context_length=512,
            step_s=0.001,
            prefill_s_per_token=0.002,
            max_running_requests=8,
        )
    )
    info = await engine.start(lambda _: None)
    await engine.warm_up()
    try:
        yield RunningEngine(engine, info)
    finally:
        await engine.close()


ENGINES = [
    pytest.param(simulated, id="simulated"),
]
