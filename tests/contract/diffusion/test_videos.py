"""GenerateVideo over a real channel: an MP4 that players read, its metadata, its bytes."""

from __future__ import annotations

import io
import json
from typing import Any

import av

from millstream_server.engines.simulated.diffuser import pixels_of
from millstream_testing.waiting import until
from tests.contract.diffusion.test_images import job_like, opened_image
from tests.support.worker.diffusion_worker import VIDEOS, streaming


def decoded(file: bytes) -> tuple[Any, list[Any]]:
    """Return the container, and the frames as arrays."""
    container: Any = av.open(io.BytesIO(file))
    frames = [
        frame.reformat(format="rgb24", src_colorspace="ITU709").to_ndarray()
        for frame in container.decode(video=0)
    ]
    return container, frames


async def test_a_video_is_the_engines_with_its_settings_inside() -> None:
    async with streaming(VIDEOS) as (_, stream):
        await stream.start(0, "rain", frames=13, fps=8, seed=7, width=96, height=64)
        view = await stream.finished(0)
        assert view.finished is not None
        container, frames = decoded(view.files[0])
        video = container.streams.video[0]
        assert video.codec_context.name == "h264"
        assert video.codec_context.pix_fmt == "yuv420p"
        assert video.average_rate == 8
        assert len(frames) == 13
        pixels = pixels_of(job_like(prompt="rain", frames=13, width=96, height=64)).data
        for n, frame in enumerate(frames):
            assert frame.shape == (64, 96, 3)
            at = ((n * 64 + 20) * 96 + 40) * 3
            exact = pixels[at : at + 3]
            assert all(abs(int(a) - b) <= 8 for a, b in zip(frame[20, 40], exact, strict=True))
        assert container.metadata["title"] == "rain"
        about = json.loads(container.metadata["comment"])
        assert (about["frames"], about["fps"], about["seed"]) == (13, 8, 7)
        assert (view.finished.settings.frames, view.finished.settings.fps) == (13, 8)
        assert view.finished.outputs[0].media_type == "video/mp4"
        assert view.finished.usage.pixel_steps == 96 * 64 * 13 * 4


async def test_defaults_previews_and_the_same_bytes_again() -> None:
    async with streaming(VIDEOS) as (one, stream):
        one.engine.by_hand()
        await stream.start(0, seed=7, steps=1, preview_every_steps=1)
        one.engine.allow(1)
        await until(lambda: any(p.preview for p in stream.slots[0].progress))
        one.engine.allow(1)
        first = await stream.finished(0)
        preview = next(p.preview for p in first.progress if p.preview)
        assert opened_image(preview).size == (64, 64)
        await stream.start(1, seed=7, steps=1)
        one.engine.allow(2)
        second = await stream.finished(1)
        assert first.files[0] == second.files[0]
        assert second.finished is not None
        assert (second.finished.settings.frames, second.finished.settings.fps) == (9, 16)
        assert len(decoded(first.files[0])[1]) == 9
