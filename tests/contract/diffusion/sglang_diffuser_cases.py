"""SGLang's engine for images and videos: against the bare `DiffGenerator`, and what only it does.

Run by `tests/integration/sglang_engine/test_diffuser.py`, in a process of its own.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import pytest_asyncio

from millstream_server.diffusion.diffuser import Step
from millstream_server.diffusion.request import Kind
from millstream_server.engines.sglang.diffuser import SglangDiffuser, SglangDiffuserConfig
from millstream_server.engines.sglang.diffusion import requests
from millstream_server.media.items import Frames, Modality
from millstream_server.runtime.errors import (
    EngineFailedError,
    InternalError,
    InvalidRequestError,
    OverloadedError,
)
from millstream_testing.waiting import until
from tests.support.engines.diffuser_engines import RunningDiffuser, sglang_engine
from tests.support.models.tiny_pipelines import TinyPipelines

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(120)]

_MANY = 2000


@pytest.fixture(scope="module")
def bare(tiny_pipelines: TinyPipelines) -> dict[str, np.ndarray]:
    """What SGLang makes without us, of an image and a video."""
    jobs = {
        "image": ({}, "Z-Image-Turbo"),
        "video": ({"num_frames": 5}, "Wan2.1-T2V-1.3B-Diffusers"),
    }
    return {
        name: _generate(getattr(tiny_pipelines, name), model_id, further)
        for name, (further, model_id) in jobs.items()
    }


def _generate(folder: Path, model_id: str, further: dict[str, Any]) -> np.ndarray:
    from sglang.multimodal_gen import DiffGenerator  # noqa: PLC0415 - only in this process

    generator = DiffGenerator.from_pretrained(
        model_path=str(folder), model_id=model_id, num_gpus=1, log_level="error"
    )
    made = generator.generate(
        sampling_params_kwargs={
            "prompt": "a red circle on white",
            "negative_prompt": "a dark blue square",
            "width": 32,
            "height": 48,
            "num_inference_steps": 4,
            "guidance_scale": 3.0,
            "seed": 2**40 + 5,
            "save_output": False,
            "return_frames": True,
            **further,
        }
    )
    generator.shutdown()
    return np.asarray(made.samples)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def images(
    bare: dict[str, np.ndarray], tiny_pipelines: TinyPipelines
) -> AsyncIterator[RunningDiffuser]:
    assert bare  # one engine at a time
    async with sglang_engine(tiny_pipelines.image, cancel_timeout_s=0.5) as running:
        yield running


async def made(running: RunningDiffuser, **changes: Any) -> np.ndarray:
    frames = await running.diffuser.diffuse(running.job(**changes), lambda _: None)
    return np.frombuffer(frames.data, np.uint8).reshape(
        frames.count, frames.height, frames.width, 3
    )


def _engine(running: RunningDiffuser) -> SglangDiffuser:
    assert isinstance(running.diffuser, SglangDiffuser)
    return running.diffuser


def _pids(running: RunningDiffuser) -> list[int]:
    processes = _engine(running)._scheduler.generator.local_scheduler_process
    return [process.pid for process in processes]


class Held:
    """A job that runs until something happens to it."""

    def __init__(self, running: RunningDiffuser) -> None:
        self._begun = asyncio.Event()
        job = running.job(steps=_MANY)
        self.task = asyncio.ensure_future(running.diffuser.diffuse(job, self._on_step))

    def _on_step(self, _: Step) -> None:
        self._begun.set()

    async def begun(self) -> None:
        await self._begun.wait()


async def test_an_image_equals_the_bare_generator(
    images: RunningDiffuser, bare: dict[str, np.ndarray]
) -> None:
    changes = {"seed": 2**40 + 5, "negative_prompt": "a dark blue square"}
    np.testing.assert_array_equal(await made(images, **changes), bare["image"])
    np.testing.assert_array_equal(
        await made(images, **changes, preview_every_steps=1), bare["image"]
    )


async def test_facts_of_an_image_pipeline(images: RunningDiffuser) -> None:
    info = images.info
    assert (info.engine, info.engine_version) == ("sglang", "0.5.23")
    assert info.kinds == {Kind.IMAGE}
    assert (info.size_step, info.min_size) == (16, 16)
    assert (info.default_width, info.default_height) == (1024, 1024)
    assert (info.default_steps, info.default_guidance_scale, info.max_steps) == (9, 0.0, 1000)
    assert info.schedulers == ("flow_match_euler",)
    assert not info.image_to_image
    assert info.max_prompt_tokens == 512


@pytest.mark.parametrize(
    ("change", "field", "sentence"),
    [
        ({"width": 8208}, "options.width", "8208 is above 8192"),
        (
            {"guidance_scale": 0.0, "negative_prompt": "dark"},
            "options.negative_prompt",
            "no effect with guidance_scale 0",
        ),
        ({"input_image": True}, "input_image", "starts from a prompt only"),
    ],
)
async def test_refusals(
    images: RunningDiffuser, change: dict[str, Any], field: str, sentence: str
) -> None:
    if "input_image" in change:
        grey = memoryview(bytes(3 * 32 * 48))
        frame = Frames(modality=Modality.IMAGE, width=32, height=48, data=grey)
        change = {"input_image": frame}
    with pytest.raises(InvalidRequestError) as caught:
        await made(images, **change)
    (violation,) = caught.value.violations
    assert violation.field == field
    assert sentence in violation.description


async def test_what_sglang_refuses_is_told_without_its_words(images: RunningDiffuser) -> None:
    with pytest.raises(InvalidRequestError, match="The engine refused the request"):
        await made(images, steps=-1)
    with images.failing(), pytest.raises(InternalError, match="quote id"):
        await made(images)


async def test_too_little_memory_is_named(images: RunningDiffuser) -> None:
    class Result:
        error = "CUDA out of memory. Tried to allocate 4 GiB"

    with pytest.raises(OverloadedError, match="too little memory for 32 x 48 pixels"):
        requests.read_result(Result(), images.job(), Kind.IMAGE)


# ---- processes that end, hang, fail to start


async def test_a_killed_process_costs_the_open_job_and_is_replaced(
    images: RunningDiffuser,
) -> None:
    wanted = await made(images)
    held, (pid,) = Held(images), _pids(images)
    await held.begun()
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(EngineFailedError, match="process of the engine ended") as caught:
        await held.task
    assert caught.value.retryable
    np.testing.assert_array_equal(await made(images), wanted)
    assert _pids(images) != [pid]
    assert images.failures == []


async def test_a_job_that_goes_on_after_a_cancel_is_killed(images: RunningDiffuser) -> None:
    wanted = await made(images)
    held, (pid,) = Held(images), _pids(images)
    await held.begun()
    os.kill(pid, signal.SIGSTOP)  # a step that hangs
    held.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await held.task
    await until(lambda: not psutil.pid_exists(pid))  # what it had open ends a moment before it
    np.testing.assert_array_equal(await made(images), wanted)


async def test_a_video_equals_the_bare_generator_and_too_many_losses_end_the_engine(
    images: RunningDiffuser, bare: dict[str, np.ndarray], tiny_pipelines: TinyPipelines
) -> None:
    (pid,) = _pids(images)
    await images.diffuser.close()
    assert not psutil.pid_exists(pid)
    async with sglang_engine(tiny_pipelines.video, max_restarts=1) as videos:
        info = videos.info
        assert info.kinds == {Kind.VIDEO}
        assert (info.size_step, info.min_size, info.frame_step) == (16, 32, 4)
        assert (info.default_width, info.default_height) == (832, 480)
        assert (info.default_frames, info.max_frames, info.default_fps) == (81, 81, 16)
        assert info.schedulers == ("unipc",)
        changes = {"seed": 2**40 + 5, "negative_prompt": "a dark blue square"}
        np.testing.assert_array_equal(await made(videos, **changes), bare["video"])
        for _ in range(2):
            held = Held(videos)
            await held.begun()
            os.kill(_pids(videos)[0], signal.SIGKILL)
            with pytest.raises(EngineFailedError):
                await held.task
        await until(lambda: bool(videos.failures))
        with pytest.raises(EngineFailedError, match="more than 1 times within 600 s"):
            await made(videos)
        (failure,) = videos.failures
        assert "more than 1 times" in str(failure)


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (lambda folder: (folder / "model_index.json").unlink(), "model_index.json can't be read"),
        (lambda folder: shutil.rmtree(folder / "vae"), "could not be started"),
        (
            lambda folder: (folder / "millstream.json").write_text('{"step": 4}'),
            r"unknown \['step'\]",
        ),
        (lambda folder: _rename_class(folder, "OtherPipeline"), "a OtherPipeline, and its folder"),
    ],
)
async def test_starts_that_fail(
    tiny_pipelines: TinyPipelines,
    tmp_path: Path,
    spoil: Callable[[Path], object],
    sentence: str,
) -> None:
    folder = shutil.copytree(tiny_pipelines.image, tmp_path / "model")
    spoil(folder)
    engine = SglangDiffuser(SglangDiffuserConfig(model_path=folder, device="cpu"))
    before = set(psutil.Process().children(recursive=True))  # some may be about to end
    with pytest.raises(EngineFailedError, match=sentence):
        await engine.start(lambda _: None)
    with pytest.raises(EngineFailedError):
        await engine.probe(0)
    await engine.close()
    await engine.close()
    assert set(psutil.Process().children(recursive=True)) <= before


def _rename_class(folder: Path, name: str) -> None:
    file = folder / "model_index.json"
    index = json.loads(file.read_text())
    file.write_text(json.dumps({**index, "_class_name": name}))


async def test_a_close_ends_a_start(tiny_pipelines: TinyPipelines) -> None:
    engine = SglangDiffuser(SglangDiffuserConfig(model_path=tiny_pipelines.image, device="cpu"))
    start = asyncio.ensure_future(engine.start(lambda _: None))
    await until(lambda: bool(_schedulers()) or start.done())
    await engine.close()
    with pytest.raises(EngineFailedError):
        await start
    assert not _schedulers()


def _schedulers() -> list[str]:
    import multiprocessing  # noqa: PLC0415

    return [each.name for each in multiprocessing.active_children()]
