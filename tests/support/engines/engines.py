"""The engines that the conformance suite runs over.

Each entry makes a running engine and takes it down again. SGLang takes a process over (its shutdown
kills every child), so for it the suite is run once more in a pytest of its own, by
`tests/integration/sglang_engine/test_conformance.py`, which names a model in `MODEL_VARIABLE`.
vLLM is in the list where it is installed: `make test-vllm` runs the tests marked so.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path

import pytest

from millstream_server.engines.sglang.engine import SglangEngine, SglangEngineConfig
from millstream_server.engines.simulated.engine import SimulatedConfig, SimulatedEngine
from millstream_server.engines.vllm.config import VllmEngineConfig
from millstream_server.engines.vllm.engine import VllmEngine
from millstream_server.generation.generator import GeneratorEngine, GeneratorInfo
from tests.support.models.models import make_random_model


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


_vllm: list[RunningEngine] = []


@contextlib.asynccontextmanager
async def vllm() -> AsyncIterator[RunningEngine]:
    """The real engine, started once for all tests; the last test closes it."""
    if not _vllm:
        model = make_random_model(Path(tempfile.mkdtemp(prefix="millstream-model-")), heads=2)
        engine = VllmEngine(VllmEngineConfig(model_path=str(model), max_running_requests=8))
        info = await engine.start(lambda _: None)
        await engine.warm_up()
        _vllm.append(RunningEngine(engine, info))
    yield _vllm[0]


HAS_VLLM = importlib.util.find_spec("vllm") is not None
MODEL_VARIABLE = "TEST_SGLANG_MODEL"
ENGINES = [
    pytest.param(sglang, id="sglang", marks=pytest.mark.sglang)
    if MODEL_VARIABLE in os.environ
    else pytest.param(simulated, id="simulated"),
]
if HAS_VLLM:
    ENGINES.append(pytest.param(vllm, id="vllm", marks=pytest.mark.vllm))
