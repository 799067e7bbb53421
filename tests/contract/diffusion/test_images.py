"""GenerateImage over a real channel: pixels, files, progress, previews, several outputs."""

from __future__ import annotations

import io
import json
from typing import Any

from PIL import Image

from millstream.v1 import diffusion_pb2
from millstream_server.diffusion.diffuser import Job
from millstream_server.engines.simulated.diffuser import pixels_of, steps_of
from millstream_server.media.items import Frames, Modality
from millstream_testing.waiting import until
from tests.support.media.media_files import saved, solid
from tests.support.worker.diffusion_worker import SIZE, streaming

WEBP = diffusion_pb2.IMAGE_FORMAT_WEBP


def opened_image(file: bytes) -> Any:
    return Image.open(io.BytesIO(file))


def job_like(**changes: Any) -> Job:
    """Return the job of a request that sets nothing but a seed of 7."""
    settings: dict[str, Any] = {
        "prompt": "a cat",
        "negative_prompt": "",
        "width": SIZE,
        "height": SIZE,
        "steps": 4,
        "guidance_scale": 1.0,
        "seed": 7,
        "scheduler": "simulated",
    }
    return Job(**(settings | changes))


async def test_an_image_is_the_engines_with_its_settings_inside() -> None:
    async with streaming() as (_, stream):
        await stream.start(
            3,
            "ein größeres Bild",
            request_id="r1",
            negative_prompt="dogs",
            width=96,
            height=32,
            steps=3,
            guidance_scale=7.1,
            seed=7,
            scheduler="other",
        )
        view = await stream.finished(3)
        assert view.finished is not None
        job = job_like(
            prompt="ein größeres Bild",
            negative_prompt="dogs",
            width=96,
            height=32,
            steps=3,
            guidance_scale=7.1,
            scheduler="other",
        )
        image = opened_image(view.files[0])
        assert (image.format, image.size) == ("PNG", (96, 32))
        assert image.tobytes() == bytes(pixels_of(job).data)
        assert image.text["Description"] == "ein größeres Bild"
        assert json.loads(image.text["millstream"]) == {
            "model": "tiny-pictures",
            "prompt": "ein größeres Bild",
            "negative_prompt": "dogs",
            "width": 96,
            "height": 32,
            "steps": 3,
            "guidance_scale": 7.1,
            "seed": 7,
            "scheduler": "other",
        }
        end = view.finished
        assert end.request_id == "r1"
        assert (end.settings.model, end.settings.seed, end.settings.steps) == (
            "tiny-pictures",
            7,
            3,
        )
        assert not end.settings.HasField("strength")
        (output,) = end.outputs
        assert (output.seed, output.media_type, output.url) == (7, "image/png", "")
        assert output.total_bytes == len(view.files[0])
        assert view.complete == {0}
        usage = end.usage
        assert (usage.steps, usage.pixel_steps, usage.prompt_tokens) == (3, 96 * 32 * 3, 3)
        assert usage.running.ToNanoseconds() > 0


async def test_defaults_are_the_models_and_a_seed_is_drawn() -> None:
    async with streaming() as (_, stream):
        await stream.start(0)
        await stream.start(1)
        first, second = await stream.finished(0), await stream.finished(1)
        assert first.finished is not None
        assert second.finished is not None
        settings = first.finished.settings
        assert (settings.width, settings.height, settings.steps) == (SIZE, SIZE, 4)
        assert (settings.guidance_scale, settings.scheduler) == (1.0, "simulated")
        assert settings.seed != second.finished.settings.seed
        expected = pixels_of(job_like(seed=settings.seed))
        assert opened_image(first.files[0]).tobytes() == bytes(expected.data)


async def test_webp_is_lossless_and_has_the_settings_too() -> None:
    async with streaming() as (_, stream):
        await stream.start(0, "größer", format=WEBP, seed=7)
        view = await stream.finished(0)
        image = opened_image(view.files[0])
        assert image.format == "WEBP"
        assert image.convert("RGB").tobytes() == bytes(pixels_of(job_like(prompt="größer")).data)
        about = json.loads(image.getexif()[0x010E])
        assert (about["prompt"], about["seed"], about["steps"]) == ("größer", 7, 4)


async def test_the_same_seed_gives_the_same_bytes_whoever_asks() -> None:
    async with streaming() as (_, stream):
        for slot, request_id in enumerate(("one", "two")):
            await stream.start(slot, request_id=request_id, seed=7)
            await stream.start(slot + 2, request_id=request_id, seed=7, format=WEBP)
        files = [(await stream.finished(slot)).files[0] for slot in range(4)]
        assert files[0] == files[1]
        assert files[2] == files[3]


async def test_outputs_have_seeds_one_after_another_and_nobody_comes_between() -> None:
    async with streaming() as (one, stream):
        one.engine.by_hand()
        await stream.start(0, n=3, seed=7, steps=2)
        await stream.start(1, seed=100, steps=2)
        one.engine.allow(4 * (2 + 1))
        view = await stream.finished(0)
        await stream.finished(1)
        assert view.finished is not None
        assert [output.seed for output in view.finished.outputs] == [7, 8, 9]
        assert view.complete == {0, 1, 2}
        assert view.finished.usage.steps == 6
        assert view.finished.usage.pixel_steps == 3 * 2 * SIZE * SIZE
        assert [job.seed for job in one.engine.jobs] == [7, 8, 9, 100]
        await stream.start(2, seed=7, steps=2)
        one.engine.allow(2 + 1)
        assert (await stream.finished(2)).files[0] == view.files[0]


async def test_each_step_is_reported_in_order() -> None:
    async with streaming() as (one, stream):
        one.engine.by_hand()
        await stream.start(0, n=2, steps=3)
        view = stream.slots[0]
        await until(lambda: view.steps == [(0, 0, 3)])
        for output in range(2):
            for step in range(1, 4):
                one.engine.allow(1)
                await until(lambda now=(output, step, 3): view.steps[-1] == now)  # type: ignore[misc]
            one.engine.allow(1)  # the output's end
        await stream.finished(0)
        assert view.steps == [(0, 0, 3), *((o, s, 3) for o in range(2) for s in range(1, 4))]
        elapsed = [p.elapsed.ToNanoseconds() for p in view.progress]
        assert elapsed == sorted(elapsed)
        assert view.positions == []
        assert not any(p.preview for p in view.progress)


async def test_previews_come_with_every_so_many_steps() -> None:
    async with streaming() as (one, stream):
        one.engine.by_hand()
        await stream.start(0, steps=4, preview_every_steps=2, width=1024, height=512, seed=7)
        view = stream.slots[0]
        for step in range(1, 5):
            one.engine.allow(1)
            await until(lambda s=step: (0, s, 4) in view.steps)  # type: ignore[misc]
        one.engine.allow(1)
        await stream.finished(0)
        previews = {p.step: p.preview for p in view.progress if p.preview}
        assert sorted(previews) == [2, 4]
        for step, preview in previews.items():
            image = opened_image(preview).convert("RGB")
            assert image.size == (512, 256)
            wanted = pixels_of(job_like(width=1024, height=512, steps=step)).data
            middle = image.getpixel((256, 128))
            exact = wanted[(256 * 1024 + 512) * 3 : (256 * 1024 + 512) * 3 + 3]
            assert all(abs(a - b) < 12 for a, b in zip(middle, exact, strict=True))


async def test_a_large_file_comes_in_chunks() -> None:
    noise = saved(Image.effect_noise((1024, 1024), 200).convert("RGB"), "PNG")
    async with streaming() as (_, stream):
        await stream.start(0, width=1024, height=1024, input_image={"data": noise})
        view = await stream.finished(0)
        assert view.finished is not None
        assert len(view.chunks) > 1
        assert all(size == 1 << 20 for size in view.chunks[:-1])
        assert len(view.files[0]) == view.finished.outputs[0].total_bytes
        opened_image(view.files[0]).load()


async def test_an_input_image_is_scaled_and_cut_to_the_outputs_size() -> None:
    # Twice as wide as the output: a quarter on the left and on the right is cut off.
    wide = Image.new("RGB", (256, 128), "blue")
    wide.paste((255, 0, 0), (64, 0, 192, 128))
    async with streaming() as (_, stream):
        image = {"data": saved(wide, "PNG"), "strength": 0.5}
        await stream.start(0, seed=7, input_image=image)
        await stream.start(1, seed=7, input_image={"data": solid("JPEG", (SIZE, SIZE))})
        view = await stream.finished(0)
        assert view.finished is not None
        red = Frames(
            modality=Modality.IMAGE,
            width=SIZE,
            height=SIZE,
            data=memoryview(bytes([255, 0, 0]) * SIZE * SIZE),
        )
        job = job_like(input_image=red, strength=0.5)
        made = opened_image(view.files[0])
        assert made.getpixel((SIZE // 2, 5)) == _pixel(pixels_of(job), SIZE // 2, 5)
        assert view.finished.usage.steps == steps_of(job) == 2
        assert view.finished.settings.strength == 0.5
        assert json.loads(made.text["millstream"])["strength"] == 0.5
        second = await stream.finished(1)
        assert second.finished is not None
        assert second.finished.settings.strength == 0.6000000238418579  # as float32


def _pixel(frames: Frames, x: int, y: int) -> tuple[int, ...]:
    at = (y * frames.width + x) * 3
    return tuple(frames.data[at : at + 3])
