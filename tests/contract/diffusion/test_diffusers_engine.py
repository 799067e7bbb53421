"""The engine on diffusers: against the bare pipeline, and what only it does."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import shutil
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from millstream_server.engines.diffusers import engine as module
from millstream_server.engines.diffusers.config import DiffusersConfig
from millstream_server.engines.diffusers.engine import DiffusersEngine
from millstream_server.media.frames import Frames
from millstream_server.media.items import Modality
from millstream_server.runtime.errors import (
    EngineFailedError,
    InternalError,
    InvalidRequestError,
    OverloadedError,
    ServingError,
)
from millstream_server.synthesis.diffuser import Step
from millstream_server.synthesis.request import Kind
from tests.support.diffuser_engines import (
    RunningDiffuser,
    bare_pipeline,
    diffusers_images,
    diffusers_videos,
)
from tests.support.tiny_pipelines import TinyPipelines, for_vendors
from tests.support.waiting import until

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.filterwarnings("ignore")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def images(tiny_pipelines: TinyPipelines) -> AsyncIterator[RunningDiffuser]:
    async with diffusers_images(tiny_pipelines) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def videos(tiny_pipelines: TinyPipelines) -> AsyncIterator[RunningDiffuser]:
    async with diffusers_videos(tiny_pipelines) as running:
        yield running


async def array(running: RunningDiffuser, **changes: Any) -> np.ndarray:
    made = await running.diffuser.diffuse(running.job(**changes), lambda _: None)
    return np.frombuffer(made.data, np.uint8).reshape(made.count, made.height, made.width, 3)


def arguments(seed: int, **further: Any) -> dict[str, Any]:
    """What a user of the bare pipeline passes for `RunningDiffuser.job`."""
    import torch  # noqa: PLC0415 - seconds, for these tests only

    given = {"prompt": "a red circle on white", "width": 32, "height": 48, "guidance_scale": 3.0}
    given |= {"num_inference_steps": 4, "generator": torch.Generator("cpu").manual_seed(seed)}
    return given | further


def loaded(folder: Path) -> Any:
    import diffusers  # noqa: PLC0415

    with for_vendors():
        return diffusers.DiffusionPipeline.from_pretrained(folder)


# ---- the same as the bare pipeline


async def test_an_image_equals_the_bare_pipeline(
    images: RunningDiffuser, tiny_pipelines: TinyPipelines
) -> None:
    pipe = loaded(tiny_pipelines.image)
    for seed, changes in ((1, {}), (2**40 + 5, {"negative_prompt": "a dark blue square"})):
        wanted = pipe(**arguments(seed, **changes)).images[0]
        made = await array(images, seed=seed, preview_every_steps=1, **changes)
        np.testing.assert_array_equal(made[0], np.asarray(wanted))


async def test_an_image_of_another_scheduler_equals_the_bare_pipeline(
    images: RunningDiffuser, tiny_pipelines: TinyPipelines
) -> None:
    import diffusers  # noqa: PLC0415

    pipe = loaded(tiny_pipelines.image)
    pipe.scheduler = diffusers.UniPCMultistepScheduler(
        use_flow_sigmas=True, prediction_type="flow_prediction", flow_shift=3.0
    )
    wanted = pipe(**arguments(3, num_inference_steps=6)).images[0]
    made = await array(images, seed=3, steps=6, scheduler="unipc")
    np.testing.assert_array_equal(made[0], np.asarray(wanted))


async def test_an_image_from_an_image_equals_the_bare_pipeline(
    images: RunningDiffuser, tiny_pipelines: TinyPipelines
) -> None:
    import diffusers  # noqa: PLC0415
    from PIL import Image  # noqa: PLC0415

    given = np.random.default_rng(0).integers(0, 256, (48, 32, 3), np.uint8)
    pipe = diffusers.ZImageImg2ImgPipeline(**loaded(tiny_pipelines.image).components)
    wanted = pipe(**arguments(4, image=Image.fromarray(given), strength=0.6)).images[0]
    frame = Frames(modality=Modality.IMAGE, width=32, height=48, data=memoryview(given.tobytes()))
    made = await array(images, seed=4, input_image=frame, strength=0.6)
    np.testing.assert_array_equal(made[0], np.asarray(wanted))


@pytest.mark.parametrize("scheduler", ["unipc", "flow_match_euler"])
async def test_a_video_equals_the_bare_pipeline(
    videos: RunningDiffuser, tiny_pipelines: TinyPipelines, scheduler: str
) -> None:
    import diffusers  # noqa: PLC0415

    pipe = loaded(tiny_pipelines.video)
    if scheduler == "flow_match_euler":
        pipe.scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
    wanted = pipe(**arguments(5, num_frames=9), output_type="pil").frames[0]
    made = await array(videos, seed=5, frames=9, scheduler=scheduler, preview_every_steps=1)
    np.testing.assert_array_equal(made, np.stack([np.asarray(frame) for frame in wanted]))


# ---- what it tells of itself


async def test_facts_of_an_image_pipeline(images: RunningDiffuser) -> None:
    info = images.info
    assert info.kinds == {Kind.IMAGE}
    assert (info.size_step, info.default_width, info.default_height) == (16, 1024, 1024)
    assert (info.default_steps, info.default_guidance_scale, info.max_steps) == (50, 5.0, 1000)
    assert info.schedulers == ("flow_match_euler", "unipc")
    assert info.image_to_image
    assert info.negative_prompts
    assert info.default_frames == info.max_frames == info.default_fps == 0


async def test_facts_of_a_video_pipeline(videos: RunningDiffuser) -> None:
    info = videos.info
    assert info.kinds == {Kind.VIDEO}
    assert (info.size_step, info.default_width, info.default_height) == (16, 832, 480)
    assert (info.default_frames, info.max_frames, info.frame_step, info.default_fps) == (
        (81, 81, 4, 16)
    )
    assert info.schedulers == ("unipc", "flow_match_euler", "dpm_solver", "deis")
    assert not info.image_to_image


async def test_tokens_are_those_that_the_text_encoder_reads(images: RunningDiffuser) -> None:
    """Of Z-Image with the conversation around the prompt; uncut."""
    read: list[int] = []
    pipe = bare_pipeline(_engine(images))
    prompt = "a red circle on white"
    hook = pipe.text_encoder.register_forward_pre_hook(
        lambda _module, _args, given: read.append(int(given["attention_mask"][0].sum())),
        with_kwargs=True,
    )
    await array(images, prompt=prompt, guidance_scale=0.0)
    hook.remove()
    assert read == [images.diffuser.count_tokens(prompt)]


async def test_a_model_file_sets_defaults(tiny_pipelines: TinyPipelines, tmp_path: Path) -> None:
    said = {"width": 64, "height": 32, "steps": 7, "guidance_scale": 2, "max_prompt_tokens": 40}
    folder = _copy(tiny_pipelines.image, tmp_path, **said, max_steps=9, max_pixels=4096)
    async with _started(folder) as (engine, info):
        assert (info.default_width, info.default_height, info.max_pixels) == (64, 32, 4096)
        assert (info.default_steps, info.max_steps) == (7, 9)
        assert (info.default_guidance_scale, info.max_prompt_tokens) == (2.0, 40)
        padded: list[int] = []
        bare_pipeline(engine).text_encoder.register_forward_pre_hook(
            lambda _module, _args, given: padded.append(given["input_ids"].shape[1]),
            with_kwargs=True,
        )
        await engine.probe(0)
        assert set(padded) == {40}


# ---- starts that fail


def _says(**defaults: Any) -> Callable[[Path], object]:
    return lambda folder: (folder / "millstream.json").write_text(json.dumps(defaults))


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (lambda folder: (folder / "model_index.json").unlink(), "has no model_index.json"),
        (lambda folder: shutil.rmtree(folder / "vae"), "could not be loaded"),
        (_says(width=60, height=64), "default size is 60 x 64, not of multiples of 16"),
        (_says(width=64, height=64, max_pixels=4095), "more than 4095 pixels"),
        (_says(steps=9, max_steps=8), "9 default steps are more than the 8 allowed"),
        (_says(step=4), r"unknown \['step'\]"),
        (lambda folder: _rename_class(folder, "ZImageImg2ImgPipeline"), "it needs an image"),
    ],
)
async def test_starts_that_fail(
    tiny_pipelines: TinyPipelines,
    tmp_path: Path,
    spoil: Callable[[Path], object],
    sentence: str,
) -> None:
    folder = _copy(tiny_pipelines.image, tmp_path)
    spoil(folder)
    engine = DiffusersEngine(DiffusersConfig(model_path=folder, device="cpu"))
    with for_vendors(), pytest.raises(EngineFailedError, match=sentence):
        await engine.start(lambda _: None)
    with pytest.raises(EngineFailedError, match="has not started"):
        await engine.probe(0)
    await engine.close()
    await engine.close()


def _copy(source: Path, target: Path, **defaults: Any) -> Path:
    folder = shutil.copytree(source, target / "model")
    _says(**defaults)(folder)
    return folder


def _rename_class(folder: Path, name: str) -> None:
    file = folder / "model_index.json"
    file.write_text(file.read_text().replace("ZImagePipeline", name))


@contextlib.asynccontextmanager
async def _started(folder: Path) -> AsyncIterator[tuple[DiffusersEngine, Any]]:
    engine = DiffusersEngine(DiffusersConfig(model_path=folder, device="cpu"))
    with for_vendors():
        info = await engine.start(lambda _: None)
        try:
            yield engine, info
        finally:
            await engine.close()


def _engine(running: RunningDiffuser) -> DiffusersEngine:
    assert isinstance(running.diffuser, DiffusersEngine)
    return running.diffuser


# ---- refusals


@pytest.mark.parametrize(
    ("change", "field", "sentence"),
    [
        ({"width": 8208}, "options.width", "8208 is above 8192"),
        ({"height": 16384}, "options.height", "16384 is above 8192"),
        (
            {"guidance_scale": 0.0, "negative_prompt": "dark"},
            "options.negative_prompt",
            "no effect with guidance_scale 0",
        ),
        (
            {"scheduler": "unipc", "strength": 0.5, "input_image": None},
            "options.scheduler",
            "unipc can't start from an image; use flow_match_euler",
        ),
    ],
)
async def test_refusals(
    images: RunningDiffuser, change: dict[str, Any], field: str, sentence: str
) -> None:
    if "input_image" in change:
        change = change | {"input_image": _grey()}
    with pytest.raises(InvalidRequestError) as caught:
        await array(images, **change)
    (violation,) = caught.value.violations
    assert violation.field == field
    assert sentence in violation.description


async def test_wan_guides_above_1_only_and_starts_from_no_image(videos: RunningDiffuser) -> None:
    with pytest.raises(InvalidRequestError, match="no effect with guidance_scale 1"):
        await array(videos, guidance_scale=1.0, negative_prompt="dark")
    with pytest.raises(InvalidRequestError, match="starts from a prompt only"):
        await array(videos, input_image=_grey())


def _grey() -> Frames:
    data = memoryview(bytes([90]) * (3 * 32 * 48))
    return Frames(modality=Modality.IMAGE, width=32, height=48, data=data)


# ---- cancels, to the step


class Gate:
    """Lets a part of the pipeline run a number of times, then holds it until it is opened."""

    def __init__(self, part: Any, free: int) -> None:
        self.runs = 0
        self.held = threading.Event()
        self._free = free
        self._open = threading.Event()
        # Behind the engine's own hook: a run that is stopped is not counted.
        self._hook = part.register_forward_pre_hook(lambda *_: self._run())

    def _run(self) -> None:
        self.runs += 1
        if self.runs > self._free:
            self.held.set()
            self._open.wait()

    def open(self) -> None:
        self._open.set()

    def remove(self) -> None:
        self._hook.remove()


@contextlib.contextmanager
def gate(running: RunningDiffuser, part: str, free: int = 0) -> Iterator[Gate]:
    """``part`` is a path such as "vae.decoder"."""
    module: Any = bare_pipeline(_engine(running))
    for name in part.split("."):
        module = getattr(module, name)
    made = Gate(module, free)
    try:
        yield made
    finally:
        made.open()
        made.remove()


async def _cancel_when_held(running: RunningDiffuser, held: Gate, **changes: Any) -> list[Step]:
    """Cancel a job while a part of it is held, let it go on, and return the job's steps."""
    steps: list[Step] = []
    task = asyncio.ensure_future(running.diffuser.diffuse(running.job(**changes), steps.append))
    await asyncio.to_thread(held.held.wait, 30)
    for _ in range(2):  # a second cancel doesn't leave the engine early
        task.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert not task.done(), "the engine is not free yet"
    held.open()
    with pytest.raises(asyncio.CancelledError):
        await task
    return steps


async def test_a_cancel_during_a_step_ends_with_that_step(images: RunningDiffuser) -> None:
    wanted = await array(images)
    with gate(images, "transformer", free=2) as held:
        steps = await _cancel_when_held(images, held)
        assert [step.done for step in steps] == [1, 2]
        assert held.runs == 3
    np.testing.assert_array_equal(await array(images), wanted)


async def test_a_cancel_while_the_prompt_is_encoded_ends_before_a_step(
    images: RunningDiffuser,
) -> None:
    wanted = await array(images)
    with gate(images, "text_encoder") as held, gate(images, "transformer") as never:
        assert await _cancel_when_held(images, held) == []
        assert (held.runs, never.runs) == (1, 0)
    np.testing.assert_array_equal(await array(images), wanted)


async def test_a_cancel_while_a_video_is_decoded_ends_at_the_next_frames(
    videos: RunningDiffuser,
) -> None:
    wanted = await array(videos)
    with gate(videos, "vae.decoder", free=1) as held:
        steps = await _cancel_when_held(videos, held, frames=17)
        assert len(steps) == 4
        assert held.runs == 2
    np.testing.assert_array_equal(await array(videos), wanted)


# ---- failures


class OutOfMemoryError(RuntimeError):
    """Named as torch's."""


@contextlib.contextmanager
def failing_step(running: RunningDiffuser, error: Exception) -> Iterator[None]:
    def fail(*_: object) -> None:
        raise error

    hook = bare_pipeline(_engine(running)).transformer.register_forward_pre_hook(fail)
    try:
        yield
    finally:
        hook.remove()


async def test_too_little_memory_is_an_overload(images: RunningDiffuser) -> None:
    wanted = await array(images)
    for error in (OutOfMemoryError("secret"), RuntimeError("alloc: can't allocate memory: x")):
        with failing_step(images, error), pytest.raises(OverloadedError) as caught:
            await array(images)
        assert "32 x 48 pixels" in caught.value.message
    np.testing.assert_array_equal(await array(images), wanted)


async def test_anything_else_is_internal_with_an_id(images: RunningDiffuser) -> None:
    error = ValueError("secret")
    with failing_step(images, error), pytest.raises(InternalError) as caught:
        await array(images)
    assert caught.value.error_id in caught.value.message
    assert "secret" not in caught.value.message


async def test_numbers_that_are_none_are_no_picture(images: RunningDiffuser) -> None:
    pipe = bare_pipeline(_engine(images))
    hook = pipe.vae.decoder.register_forward_hook(lambda _m, _a, made: made * float("nan"))
    try:
        with pytest.raises(InternalError, match="not numbers"):
            await array(images)
    finally:
        hook.remove()


async def test_a_device_that_fails_ends_the_worker(
    images: RunningDiffuser, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = _engine(images)
    told: list[ServingError] = []
    monkeypatch.setattr(engine._pipeline, "device_works", lambda: False)
    monkeypatch.setattr(engine, "_on_failure", told.append)
    monkeypatch.setattr(engine, "_fault", None)
    for _ in range(2):
        error = RuntimeError("CUDA error: secret")
        with failing_step(images, error), pytest.raises(EngineFailedError, match="GPU failed"):
            await array(images)
    assert [type(error) for error in told] == [EngineFailedError]


async def test_a_hang_holds_up_neither_probes_nor_the_end(
    tiny_pipelines: TinyPipelines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_CLOSE_TIMEOUT_S", 0.05)
    async with diffusers_images(tiny_pipelines) as running:
        engine = _engine(running)
        engine._config = dataclasses.replace(engine._config, warm_up_timeout_s=0.05)
        with gate(running, "transformer") as held:
            probe = asyncio.ensure_future(engine.probe(0))
            await asyncio.to_thread(held.held.wait, 30)
            probe.cancel()
            await asyncio.wait({probe})
            assert probe.cancelled()
            # The next one waits for it: only one of them is ever in the thread.
            with pytest.raises(EngineFailedError, match=r"longer than 0\.05 s"):
                await engine.warm_up()
            await engine.close()
            assert (await engine.load()).running_requests == 1
            held.open()

            async def ended() -> bool:
                return (await engine.load()).running_requests == 0

            await until(ended)
