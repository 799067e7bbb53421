"""The engine on diffusers: against the bare pipeline, what it tells of itself, and its start."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millstream_server.diffusion.request import Kind
from millstream_server.engines.diffusers.adapter import DiffusersConfig
from millstream_server.engines.diffusers.engine import DiffusersEngine
from millstream_server.media.items import Frames, Modality
from millstream_server.runtime.errors import (
    EngineFailedError,
)
from tests.support.engines.diffuser_engines import (
    RunningDiffuser,
    bare_pipeline,
    engine_of,
    pixels,
)
from tests.support.models.tiny_pipelines import TinyPipelines, for_vendors

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.filterwarnings("ignore")]


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
        made = await pixels(images, seed=seed, preview_every_steps=1, **changes)
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
    made = await pixels(images, seed=3, steps=6, scheduler="unipc")
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
    made = await pixels(images, seed=4, input_image=frame, strength=0.6)
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
    made = await pixels(videos, seed=5, frames=9, scheduler=scheduler, preview_every_steps=1)
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
    pipe = bare_pipeline(engine_of(images))
    prompt = "a red circle on white"
    hook = pipe.text_encoder.register_forward_pre_hook(
        lambda _module, _args, given: read.append(int(given["attention_mask"][0].sum())),
        with_kwargs=True,
    )
    await pixels(images, prompt=prompt, guidance_scale=0.0)
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
