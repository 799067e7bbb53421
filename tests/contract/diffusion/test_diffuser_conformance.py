"""What every engine for images and videos must do (`tests.support.engines.diffuser_engines`)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from millstream_server.control.engine import EngineLoad
from millstream_server.diffusion.diffuser import Job, Step
from millstream_server.media.items import Frames, Modality
from millstream_server.runtime.errors import EngineFailedError, ServingError
from tests.support.engines.diffuser_engines import ENGINES, DiffuserFactory, RunningDiffuser
from tests.support.models.tiny_pipelines import TinyPipelines

# One loop for all: an engine stays on the loop it was started on.
pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.filterwarnings("ignore")]

# So many that no thread runs through them before a cancel reaches it.
_MANY = 60


@pytest_asyncio.fixture(params=ENGINES, scope="module", loop_scope="module")
async def running(
    request: pytest.FixtureRequest, tiny_pipelines: TinyPipelines
) -> AsyncIterator[RunningDiffuser]:
    factory: DiffuserFactory = request.param
    async with factory(tiny_pipelines) as started:
        yield started


class Steps(list[Step]):
    """Checks that steps come on the event loop and in order."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.get_running_loop()
        self.first = asyncio.Event()

    def __call__(self, step: Step) -> None:
        assert asyncio.get_running_loop() is self.loop
        assert step.done == len(self) + 1
        assert step.done <= step.of
        self.append(step)
        self.first.set()


async def made(running: RunningDiffuser, **changes: Any) -> bytes:
    """Run a job to its end and return its pixels."""
    job = running.job(**changes)
    return bytes(checked(await running.diffuser.diffuse(job, Steps()), job).data)


def checked(frames: Frames, job: Job) -> Frames:
    assert (frames.width, frames.height, frames.count) == (job.width, job.height, job.frames)
    assert frames.data.nbytes == 3 * job.width * job.height * job.frames
    if job.frames > 1:
        assert frames.modality is Modality.VIDEO
    return frames


def picture(running: RunningDiffuser, value: int) -> Frames:
    """One frame of the usual job's size, in one grey."""
    job = running.job()
    data = memoryview(bytes([value]) * (3 * job.width * job.height))
    return Frames(modality=Modality.IMAGE, width=job.width, height=job.height, data=data)


async def idle(running: RunningDiffuser) -> bool:
    return await running.diffuser.load() == EngineLoad(
        running_requests=0, queued_requests=0, used_blocks=0, total_blocks=0
    )


async def test_the_info_fits_together(running: RunningDiffuser) -> None:
    info = running.info
    assert info.min_size % info.size_step == 0
    for side in (info.default_width, info.default_height):
        assert side % info.size_step == 0
        assert side >= info.min_size
    assert info.default_width * info.default_height <= info.max_pixels
    assert 1 <= info.default_steps <= info.max_steps
    assert info.max_outputs >= 1
    assert info.max_running_requests == info.dp_size == 1
    assert len(set(info.schedulers)) == len(info.schedulers) >= 1
    if info.default_frames:
        assert info.default_frames % info.frame_step == 1
        assert info.max_frames >= info.default_frames
        assert info.default_fps > 0


async def test_the_same_job_gives_the_same_pixels_whatever_ran_before(
    running: RunningDiffuser,
) -> None:
    wanted = await made(running)
    assert await made(running) == wanted
    width = 4 * running.info.size_step
    other = await made(running, seed=8, steps=3, width=width, guidance_scale=1.5)
    assert len(other) != len(wanted)
    assert await made(running) == wanted


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 8},
        {"prompt": "a blue square"},
        {"steps": 5},
        {"guidance_scale": 5.0},
        {"negative_prompt": "dark"},
    ],
    ids=lambda change: next(iter(change)),
)
async def test_each_setting_changes_the_pixels(
    running: RunningDiffuser, change: dict[str, Any]
) -> None:
    if "negative_prompt" in change and not running.info.negative_prompts:
        pytest.skip("the engine takes no negative prompts")
    assert await made(running, **change) != await made(running)


async def test_a_frame_of_the_smallest_size(running: RunningDiffuser) -> None:
    side = running.info.min_size
    await made(running, width=side, height=side, steps=1, frames=1)


async def test_steps_come_in_order(running: RunningDiffuser) -> None:
    for count in (1, 5):
        steps = Steps()
        await running.diffuser.diffuse(running.job(steps=count), steps)
        assert [(step.done, step.of) for step in steps] == [(n + 1, count) for n in range(count)]


async def test_previews_come_when_asked_for_and_change_nothing(running: RunningDiffuser) -> None:
    job = running.job(steps=5, preview_every_steps=2)
    steps = Steps()
    with_previews = bytes((await running.diffuser.diffuse(job, steps)).data)
    assert [step.preview is not None for step in steps] == [False, True, False, True, False]
    previews = [step.preview for step in steps if step.preview is not None]
    for preview in previews:
        assert (preview.width, preview.height, preview.count) == (job.width, job.height, 1)
        assert preview.data.nbytes == 3 * job.width * job.height
    assert bytes(previews[0].data) != bytes(previews[1].data)
    without = Steps()
    assert bytes((await running.diffuser.diffuse(running.job(steps=5), without)).data) == (
        with_previews
    )
    assert all(step.preview is None for step in without)


async def test_the_last_preview_is_the_output(running: RunningDiffuser) -> None:
    job, steps = running.job(preview_every_steps=4), Steps()
    output = await running.diffuser.diffuse(job, steps)
    last = steps[-1].preview
    assert last is not None
    assert bytes(last.data) == bytes(output.data[: last.data.nbytes])


# ---- cancel


@pytest.mark.parametrize("at", [1, _MANY // 2])
async def test_a_cancel_ends_the_work_and_the_next_job_is_right(
    running: RunningDiffuser, at: int
) -> None:
    wanted = await made(running)
    steps = Steps()

    def on_step(step: Step) -> None:
        steps(step)
        if step.done == at:
            task.cancel()

    task = asyncio.ensure_future(running.diffuser.diffuse(running.job(steps=_MANY), on_step))
    with pytest.raises(asyncio.CancelledError):
        await task
    assert at <= len(steps) < _MANY
    reported = len(steps)
    assert await idle(running)
    assert await made(running) == wanted
    assert len(steps) == reported, "a step of a job that was cancelled, after its end"


@pytest.mark.parametrize("before_the_end", [1, 0])
async def test_a_cancel_during_the_last_step_and_after_it(
    running: RunningDiffuser, before_the_end: int
) -> None:
    wanted = await made(running)
    job = running.job(steps=5)

    def on_step(step: Step) -> None:
        if step.done == step.of - before_the_end:
            task.cancel()

    task = asyncio.ensure_future(running.diffuser.diffuse(job, on_step))
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await made(running) == wanted


async def test_a_cancel_before_the_first_step_and_again(running: RunningDiffuser) -> None:
    wanted = await made(running)
    steps = Steps()
    task = asyncio.ensure_future(running.diffuser.diffuse(running.job(steps=_MANY), steps))
    await asyncio.sleep(0)
    for _ in range(3):
        task.cancel()
        await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(steps) <= 1
    assert await made(running) == wanted


async def test_the_load_shows_the_job_that_runs(running: RunningDiffuser) -> None:
    steps = Steps()
    task = asyncio.ensure_future(running.diffuser.diffuse(running.job(steps=_MANY), steps))
    await steps.first.wait()
    load = await running.diffuser.load()
    task.cancel()
    await asyncio.wait({task})
    assert (load.running_requests, load.queued_requests) == (1, 0)
    assert await idle(running)


# ---- from an image


async def test_an_image_to_start_from(running: RunningDiffuser) -> None:
    if not running.info.image_to_image:
        pytest.skip("the engine starts from prompts only")
    dark, light = picture(running, 20), picture(running, 230)
    from_dark = await made(running, input_image=dark, strength=0.5)
    assert from_dark == await made(running, input_image=dark, strength=0.5)
    assert from_dark != await made(running, input_image=light, strength=0.5)
    assert from_dark != await made(running)


async def test_a_low_strength_runs_fewer_steps(running: RunningDiffuser) -> None:
    if not running.info.image_to_image:
        pytest.skip("the engine starts from prompts only")
    counts = []
    for strength in (0.2, 0.6, 1.0):
        steps = Steps()
        job = running.job(steps=10, input_image=picture(running, 90), strength=strength)
        await running.diffuser.diffuse(job, steps)
        assert len(steps) == steps[-1].of
        counts.append(len(steps))
    assert counts == [2, 6, 10]


# ---- schedulers, failures, probes


async def test_every_scheduler_works_and_leaves_nothing_behind(running: RunningDiffuser) -> None:
    wanted = await made(running, steps=6)
    for scheduler in running.info.schedulers[1:]:
        other = await made(running, steps=6, scheduler=scheduler)
        assert other != wanted, scheduler
        assert other == await made(running, steps=6, scheduler=scheduler)
        assert await made(running, steps=6) == wanted


async def test_a_failure_leaves_the_engine_usable(running: RunningDiffuser) -> None:
    wanted = await made(running)
    with running.failing(), pytest.raises(ServingError) as caught:
        await made(running)
    assert "secret" not in caught.value.message
    assert await idle(running)
    assert await made(running) == wanted
    assert running.failures == []


async def test_probes_and_progress(running: RunningDiffuser) -> None:
    before = running.diffuser.progress(0)
    await running.diffuser.probe(0)
    probed = running.diffuser.progress(0)
    assert probed != before
    await made(running)
    assert running.diffuser.progress(0) != probed
    assert await idle(running)


async def test_tokens_of_a_prompt(running: RunningDiffuser) -> None:
    count = running.diffuser.count_tokens
    assert 0 < count("a circle") < count("a red circle on a white ground")
    assert count("circle " * 2 * running.info.max_prompt_tokens) > running.info.max_prompt_tokens


async def test_close_fails_what_runs_and_may_come_twice(running: RunningDiffuser) -> None:
    """The last test of an engine."""
    steps = Steps()
    task = asyncio.ensure_future(running.diffuser.diffuse(running.job(steps=_MANY), steps))
    await steps.first.wait()
    await running.diffuser.close()
    with pytest.raises(EngineFailedError):
        await task
    await running.diffuser.close()
    with pytest.raises(EngineFailedError):
        await made(running)
    with pytest.raises(EngineFailedError):
        await running.diffuser.probe(0)
    assert running.failures == []
