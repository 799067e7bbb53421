"""The engine on diffusers: refusals, cancels to the step, and failures."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from millstream_server.diffusion.diffuser import Step
from millstream_server.engines.diffusers import engine as module
from millstream_server.media.items import Frames, Modality
from millstream_server.runtime.errors import (
    EngineFailedError,
    InternalError,
    InvalidRequestError,
    OverloadedError,
    ServingError,
)
from millstream_testing.waiting import until
from tests.support.engines.diffuser_engines import (
    RunningDiffuser,
    bare_pipeline,
    diffusers_images,
    engine_of,
    pixels,
)
from tests.support.models.tiny_pipelines import TinyPipelines

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.filterwarnings("ignore")]


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
        await pixels(images, **change)
    (violation,) = caught.value.violations
    assert violation.field == field
    assert sentence in violation.description


async def test_wan_guides_above_1_only_and_starts_from_no_image(videos: RunningDiffuser) -> None:
    with pytest.raises(InvalidRequestError, match="no effect with guidance_scale 1"):
        await pixels(videos, guidance_scale=1.0, negative_prompt="dark")
    with pytest.raises(InvalidRequestError, match="starts from a prompt only"):
        await pixels(videos, input_image=_grey())


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
    module: Any = bare_pipeline(engine_of(running))
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
    wanted = await pixels(images)
    with gate(images, "transformer", free=2) as held:
        steps = await _cancel_when_held(images, held)
        assert [step.done for step in steps] == [1, 2]
        assert held.runs == 3
    np.testing.assert_array_equal(await pixels(images), wanted)


async def test_a_cancel_while_the_prompt_is_encoded_ends_before_a_step(
    images: RunningDiffuser,
) -> None:
    wanted = await pixels(images)
    with gate(images, "text_encoder") as held, gate(images, "transformer") as never:
        assert await _cancel_when_held(images, held) == []
        assert (held.runs, never.runs) == (1, 0)
    np.testing.assert_array_equal(await pixels(images), wanted)


async def test_a_cancel_while_a_video_is_decoded_ends_at_the_next_frames(
    videos: RunningDiffuser,
) -> None:
    wanted = await pixels(videos)
    with gate(videos, "vae.decoder", free=1) as held:
        steps = await _cancel_when_held(videos, held, frames=17)
        assert len(steps) == 4
        assert held.runs == 2
    np.testing.assert_array_equal(await pixels(videos), wanted)


# ---- failures


class OutOfMemoryError(RuntimeError):
    """Named as torch's."""


@contextlib.contextmanager
def failing_step(running: RunningDiffuser, error: Exception) -> Iterator[None]:
    def fail(*_: object) -> None:
        raise error

    hook = bare_pipeline(engine_of(running)).transformer.register_forward_pre_hook(fail)
    try:
        yield
    finally:
        hook.remove()


async def test_too_little_memory_is_an_overload(images: RunningDiffuser) -> None:
    wanted = await pixels(images)
    for error in (OutOfMemoryError("secret"), RuntimeError("alloc: can't allocate memory: x")):
        with failing_step(images, error), pytest.raises(OverloadedError) as caught:
            await pixels(images)
        assert "32 x 48 pixels" in caught.value.message
    np.testing.assert_array_equal(await pixels(images), wanted)


async def test_anything_else_is_internal_with_an_id(images: RunningDiffuser) -> None:
    error = ValueError("secret")
    with failing_step(images, error), pytest.raises(InternalError) as caught:
        await pixels(images)
    assert caught.value.error_id in caught.value.message
    assert "secret" not in caught.value.message


async def test_numbers_that_are_none_are_no_picture(images: RunningDiffuser) -> None:
    pipe = bare_pipeline(engine_of(images))
    hook = pipe.vae.decoder.register_forward_hook(lambda _m, _a, made: made * float("nan"))
    try:
        with pytest.raises(InternalError, match="not numbers"):
            await pixels(images)
    finally:
        hook.remove()


async def test_a_device_that_fails_ends_the_worker(
    images: RunningDiffuser, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(images)
    told: list[ServingError] = []
    monkeypatch.setattr(engine._pipeline, "device_works", lambda: False)
    monkeypatch.setattr(engine, "_on_failure", told.append)
    monkeypatch.setattr(engine, "_fault", None)
    for _ in range(2):
        error = RuntimeError("CUDA error: secret")
        with failing_step(images, error), pytest.raises(EngineFailedError, match="GPU failed"):
            await pixels(images)
    assert [type(error) for error in told] == [EngineFailedError]


async def test_a_hang_holds_up_neither_probes_nor_the_end(
    tiny_pipelines: TinyPipelines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_CLOSE_TIMEOUT_S", 0.05)
    async with diffusers_images(tiny_pipelines) as running:
        engine = engine_of(running)
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
