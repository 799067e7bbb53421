"""The engines for images and videos that the conformance suite runs over.

Each entry of `ENGINES` makes a started engine with what the suite needs to know of it, and takes it
down again. Another engine joins the suite with a function like those here.

SGLang's takes a process over, so for it the suite is run once more in a pytest of its own, by
`tests/integration/sglang_engine/test_diffuser.py`, which sets `SGLANG_VARIABLE`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from millstream_server.diffusion.diffuser import Diffuser, DiffuserInfo, Job
from millstream_server.diffusion.request import Kind
from millstream_server.engines.diffusers.adapter import DiffusersConfig
from millstream_server.engines.diffusers.engine import DiffusersEngine
from millstream_server.engines.sglang.diffuser import SglangDiffuser, SglangDiffuserConfig
from millstream_server.engines.sglang.diffusion import requests
from millstream_server.engines.simulated.diffuser import SimulatedDiffuser, SimulatedDiffuserConfig
from millstream_server.runtime.errors import InternalError, ServingError
from tests.support.models.tiny_pipelines import TinyPipelines, for_vendors


@dataclass(frozen=True)
class RunningDiffuser:
    """A started and warm engine."""

    diffuser: Diffuser
    info: DiffuserInfo
    failing: Callable[[], AbstractContextManager[object]]
    """In this context every job fails at a step."""
    failures: list[ServingError]
    """What `on_failure` was called with."""

    def job(self, **changes: Any) -> Job:
        """Make a job that the engine runs in well under a second."""
        given: dict[str, Any] = {
            "prompt": "a red circle on white",
            "negative_prompt": "",
            "width": 2 * self.info.size_step,
            "height": 3 * self.info.size_step,
            "steps": 4,
            "guidance_scale": 3.0,
            "seed": 7,
            "scheduler": self.info.schedulers[0],
            "frames": self.info.frame_step + 1 if self.info.default_frames else 1,
        }
        return Job(**(given | changes))


DiffuserFactory = Callable[[TinyPipelines], AbstractAsyncContextManager[RunningDiffuser]]


@contextlib.asynccontextmanager
async def simulated_images(_: TinyPipelines) -> AsyncIterator[RunningDiffuser]:
    async with _simulated(Kind.IMAGE) as running:
        yield running


@contextlib.asynccontextmanager
async def simulated_videos(_: TinyPipelines) -> AsyncIterator[RunningDiffuser]:
    async with _simulated(Kind.VIDEO) as running:
        yield running


@contextlib.asynccontextmanager
async def _simulated(kind: Kind) -> AsyncIterator[RunningDiffuser]:
    config = SimulatedDiffuserConfig(
        kinds=frozenset({kind}), image_to_image=kind is Kind.IMAGE, step_s=0.001
    )
    diffuser = SimulatedDiffuser(config)

    def failing() -> AbstractContextManager[object]:
        return mock.patch.object(diffuser, "fault", return_value=InternalError("a fault"))

    async with _started(diffuser, failing) as running:
        yield running


@contextlib.asynccontextmanager
async def diffusers_images(pipelines: TinyPipelines) -> AsyncIterator[RunningDiffuser]:
    async with diffusers_engine(pipelines.image) as running:
        yield running


@contextlib.asynccontextmanager
async def diffusers_videos(pipelines: TinyPipelines) -> AsyncIterator[RunningDiffuser]:
    async with diffusers_engine(pipelines.video) as running:
        yield running


@contextlib.asynccontextmanager
async def diffusers_engine(folder: Path) -> AsyncIterator[RunningDiffuser]:
    engine = DiffusersEngine(DiffusersConfig(model_path=folder, device="cpu"))

    @contextlib.contextmanager
    def failing() -> Iterator[None]:
        with mock.patch.object(bare_pipeline(engine).transformer, "forward", _broken):
            yield

    with for_vendors():
        async with _started(engine, failing) as running:
            yield running


async def pixels(running: RunningDiffuser, **changes: Any) -> np.ndarray:
    """Run a job; return [frames, height, width, 3]."""
    made = await running.diffuser.diffuse(running.job(**changes), lambda _: None)
    return np.frombuffer(made.data, np.uint8).reshape(made.count, made.height, made.width, 3)


def engine_of(running: RunningDiffuser) -> DiffusersEngine:
    """Return the engine, which must be one on diffusers."""
    assert isinstance(running.diffuser, DiffusersEngine)
    return running.diffuser


def bare_pipeline(engine: DiffusersEngine) -> Any:
    """Return the pipeline that an engine runs."""
    assert engine._pipeline is not None
    return engine._pipeline._pipe


def _broken(*_: object, **__: object) -> None:
    raise RuntimeError("secret")


@contextlib.asynccontextmanager
async def _started(
    diffuser: Diffuser, failing: Callable[[], AbstractContextManager[object]]
) -> AsyncIterator[RunningDiffuser]:
    failures: list[ServingError] = []
    try:
        info = await diffuser.start(failures.append)
        await diffuser.warm_up()
        yield RunningDiffuser(diffuser, info, failing, failures)
    finally:
        await diffuser.close()


@contextlib.asynccontextmanager
async def sglang_images(pipelines: TinyPipelines) -> AsyncIterator[RunningDiffuser]:
    async with sglang_engine(pipelines.image) as running:
        yield running


@contextlib.asynccontextmanager
async def sglang_videos(pipelines: TinyPipelines) -> AsyncIterator[RunningDiffuser]:
    async with sglang_engine(pipelines.video) as running:
        yield running


@contextlib.asynccontextmanager
async def sglang_engine(folder: Path, **settings: Any) -> AsyncIterator[RunningDiffuser]:
    engine = SglangDiffuser(SglangDiffuserConfig(model_path=folder, device="cpu", **settings))
    async with _started(engine, failing_in_sglang) as running:
        yield running


@contextlib.contextmanager
def failing_in_sglang() -> Iterator[None]:
    """Ask for a size that SGLang accepts and its transformer can't divide into patches."""
    make = requests.make_request

    def make_odd(*args: Any) -> Any:
        request = make(*args)
        request.sampling_params.width += 8
        return request

    with mock.patch.object(requests, "make_request", make_odd):
        yield


SGLANG_VARIABLE = "TEST_SGLANG_DIFFUSER"
_EVERYWHERE = [
    pytest.param(simulated_images, id="simulated-images"),
    pytest.param(simulated_videos, id="simulated-videos"),
    pytest.param(diffusers_images, id="diffusers-images"),
    pytest.param(diffusers_videos, id="diffusers-videos"),
]
_IN_A_PROCESS_OF_ITS_OWN = [
    pytest.param(sglang_images, id="sglang-images"),
    pytest.param(sglang_videos, id="sglang-videos"),
]
ENGINES = _IN_A_PROCESS_OF_ITS_OWN if SGLANG_VARIABLE in os.environ else _EVERYWHERE
