"""The engines that the conformance suite runs over.

Each entry makes a running engine and takes it down again. SGLang takes a process over (its shutdown
kills every child), so for it the suite is run once more in a pytest of its own, by
`tests/integration/sglang_engine/test_conformance.py`, which names a model in `MODEL_VARIABLE`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

import pytest

from millstream_server.engines.sglang.engine import SglangEngine, SglangEngineConfig
from millstream_server.engines.simulated.engine import SimulatedConfig, SimulatedEngine
from millstream_server.generation.generator import GeneratorEngine, GeneratorInfo


@dataclass(frozen=True)
class RunningEngine:
    """A started and warm engine. Its model must be able to answer 200 tokens to a short prompt."""

    engine: GeneratorEngine
    info: GeneratorInfo


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


_sglang: list[RunningEngine] = []


@contextlib.asynccontextmanager
async def sglang() -> AsyncIterator[RunningEngine]:
    """The real engine, started once for all tests; the last test closes it."""
    if not _sglang:
        config = SglangEngineConfig(model_path=os.environ[MODEL_VARIABLE], max_running_requests=8)
        engine = SglangEngine(config)
        info = await engine.start(lambda _: None)
        await engine.warm_up()
        _sglang.append(RunningEngine(engine, info))
    yield _sglang[0]


MODEL_VARIABLE = "MILLSTREAM_TEST_SGLANG_MODEL"
ENGINES = [
    pytest.param(sglang, id="sglang", marks=pytest.mark.sglang)
    if MODEL_VARIABLE in os.environ
    else pytest.param(simulated, id="simulated"),
]
