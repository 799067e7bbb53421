"""What is refused, by its path, each beside a good request; and the rules of the stream."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import grpc
import pytest

from millstream.v1 import diffusion_pb2
from millstream_server.diffusion.worker.engine import DiffusionOptions
from millstream_server.engines.simulated.diffuser import SimulatedDiffuserConfig
from tests.support.media.media_files import png_header, solid, video
from tests.support.wire.failures import refusal
from tests.support.worker.diffusion_worker import VIDEOS, Setup, Stream, diffusion_worker, streaming

PNG = solid(size=(8, 8))
_URL = diffusion_pb2.OUTPUT_DELIVERY_URL
_BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"prompt": ""}, "options.prompt", "is empty"),
    ({"prompt": "x" * 32_769}, "options.prompt", "has 32769 bytes; at most 32768"),
    (
        {"prompt": "word " * 78},
        "options.prompt",
        "has 78 tokens; the model's text encoder reads 77",
    ),
    (
        {"negative_prompt": "word " * 90},
        "options.negative_prompt",
        "has 90 tokens; the model's text encoder reads 77",
    ),
    ({"n": 0}, "options.n", "is 0; 1 to 4 are allowed"),
    ({"n": 5}, "options.n", "is 5; 1 to 4 are allowed"),
    ({"width": 64}, "options.height", "is not set, but width is"),
    ({"height": 64}, "options.width", "is not set, but height is"),
    ({"width": 65, "height": 64}, "options.width", "such as 64 or 80"),
    ({"width": 64, "height": 0}, "options.height", "is 0; at least 16"),
    ({"width": -64, "height": 64}, "options.width", "is -64; at least 16"),
    ({"width": 4096, "height": 4096}, "options.width", "is 16777216 pixels; 4194304 are allowed"),
    ({"steps": 0}, "options.steps", "is 0; 1 to 50 are allowed"),
    ({"steps": -3}, "options.steps", "is -3; 1 to 50"),
    ({"steps": 51}, "options.steps", "is 51; 1 to 50"),
    ({"guidance_scale": -1}, "options.guidance_scale", "is -1; 0 to 100"),
    ({"guidance_scale": 100.5}, "options.guidance_scale", "is 100.5; 0 to 100"),
    ({"guidance_scale": float("nan")}, "options.guidance_scale", "is nan"),
    ({"guidance_scale": float("inf")}, "options.guidance_scale", "is inf"),
    ({"seed": 1 << 63}, "options.seed", "must be below 2^63"),
    ({"scheduler": "ddim"}, "options.scheduler", "'ddim' is not offered by this model; it offers"),
    ({"preview_every_steps": 0}, "options.preview_every_steps", "is 0; at least 1"),
    ({"delivery": 9}, "options.delivery", "9 is not a value that this server knows"),
    ({"format": 9}, "format", "9 is not a value"),
    ({"priority": 9}, "priority", "9 is not a value"),
    ({"request_id": "x" * 129}, "request_id", "has 129 bytes; at most 128"),
    ({"request_id": "a\nb"}, "request_id", "must be printable"),
    ({"input_image": {"strength": 0.5}}, "input_image.data", "is empty"),
    ({"input_image": {"data": PNG, "strength": 0}}, "input_image.strength", "is 0; above 0"),
    ({"input_image": {"data": PNG, "strength": 1.1}}, "input_image.strength", "at most 1"),
    ({"input_image": {"data": b"no image at all"}}, "input_image.data", "is text"),
    ({"input_image": {"data": b"<svg xmlns='x'/>"}}, "input_image.data", "is an SVG"),
    ({"input_image": {"data": video(2)}}, "input_image.data", "an image was expected"),
    ({"input_image": {"data": PNG[: len(PNG) // 2]}}, "input_image.data", "truncated or damaged"),
    ({"input_image": {"data": png_header(9000, 9000)}}, "input_image.data", "81000000 pixels"),
    ({"input_image": {"data": PNG + bytes(1 << 20)}}, "input_image.data", "1048576 are allowed"),
]


async def test_a_bad_request_fails_alone_with_the_field_that_is_wrong() -> None:
    async with streaming(Setup(options=DiffusionOptions(max_input_bytes=1 << 20))) as (one, stream):
        for slot, (fields, path, sentence) in enumerate(_BAD):
            await stream.start(slot, **({"prompt": "a cat"} | fields))
            view = await stream.ended(slot)
            assert (view.reason, view.fields) == ("INVALID_REQUEST", [path]), (fields, view.error)
            assert sentence in view.message, view.message
            assert view.error is not None
            assert view.error.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
        await stream.start(0)
        await stream.finished(0)
        assert len(one.engine.jobs) == 1
        await one.until_load(0, 0)


async def test_all_that_is_wrong_is_told_at_once() -> None:
    async with streaming() as (_, stream):
        await stream.start(0, "", steps=51, width=7, height=8, seed=1 << 63, scheduler="x")
        assert (await stream.ended(0)).fields == [
            "options.prompt",
            "options.width",
            "options.height",
            "options.steps",
            "options.seed",
            "options.scheduler",
        ]


async def test_what_the_model_or_the_worker_cannot_is_refused_by_name() -> None:
    engine = SimulatedDiffuserConfig(image_to_image=False, negative_prompts=False)
    async with streaming(Setup(engine)) as (_, stream):
        await stream.start(0, negative_prompt="dogs", input_image={"data": PNG}, delivery=_URL)
        view = await stream.ended(0)
        assert view.reason == "UNSUPPORTED_FEATURE"
        assert view.fields == ["input_image", "options.negative_prompt", "options.delivery"]
        assert "--storage-url" in view.message


_BAD_VIDEOS: list[tuple[dict[str, Any], str, str]] = [
    ({"frames": 0}, "frames", "is 0; 1 to 81"),
    ({"frames": 85}, "frames", "is 85; 1 to 81"),
    ({"frames": 8}, "frames", "one more than a multiple of 4, such as 5 or 9"),
    ({"fps": 0}, "fps", "is 0; 1 to 120"),
    ({"fps": 121}, "fps", "is 121; 1 to 120"),
    ({"width": 65, "height": 64}, "options.width", "multiple of 16"),
]


async def test_videos_have_rules_of_their_own() -> None:
    async with streaming(VIDEOS) as (_, stream):
        for slot, (fields, path, sentence) in enumerate(_BAD_VIDEOS):
            await stream.start(slot, **fields)
            view = await stream.ended(slot)
            assert (view.reason, view.fields) == ("INVALID_REQUEST", [path])
            assert sentence in view.message


async def test_sizes_of_videos_are_even_whatever_the_model_says() -> None:
    setup = replace(VIDEOS, engine=replace(VIDEOS.engine, size_step=5, default_size=60))
    async with streaming(setup) as (_, stream):
        await stream.start(0, width=65, height=70)
        assert "multiple of 10, such as 60 or 70" in (await stream.ended(0)).message


@pytest.mark.parametrize(
    ("setup", "method", "says"),
    [
        (Setup(), "GenerateText", "this worker makes images, no text"),
        (Setup(), "GenerateVideo", "this worker makes images, no videos"),
        (VIDEOS, "GenerateImage", "this worker makes videos, no images"),
        (VIDEOS, "GenerateText", "this worker makes videos, no text"),
    ],
)
async def test_methods_of_other_kinds_say_who_serves_them(
    setup: Setup, method: str, says: str
) -> None:
    async with diffusion_worker(setup) as one:
        failed = await refusal(getattr(one.stub, method)())
        assert failed.code is grpc.StatusCode.UNIMPLEMENTED
        assert failed.reason == "UNSUPPORTED_FEATURE"
        assert says in failed.message
        assert "--kind " in failed.message


async def test_a_slot_in_use_ends_the_stream_and_all_on_it() -> None:
    async with streaming() as (one, stream):
        one.engine.by_hand()
        await stream.start(0)
        await one.until_load(1, 0)
        again = Stream(one.stub)
        await again.start(5)
        await again.start(5)
        failed = await refusal(again.call)
        assert failed.code is grpc.StatusCode.INVALID_ARGUMENT
        assert failed.fields == ("start.slot",)
        await one.until_load(1, 0)
        one.engine.allow(5)
        await stream.finished(0)


async def test_a_message_without_a_control_ends_the_stream() -> None:
    async with diffusion_worker() as one:
        call = one.stub.GenerateImage()
        await call.write(diffusion_pb2.GenerateImageRequest())
        failed = await refusal(call)
        assert (failed.code, failed.fields) == (grpc.StatusCode.INVALID_ARGUMENT, ("control",))
