"""The queue for the device over a real channel: positions, cancels, deadlines, slow readers."""

from __future__ import annotations

import asyncio
from typing import Any

from google.protobuf.duration_pb2 import Duration
from PIL import Image

from millstream_server.diffusion.diffuser import Job
from millstream_server.diffusion.request import Kind
from millstream_server.media.items import Frames, Modality
from millstream_server.runtime.errors import EngineFailedError
from millstream_testing.waiting import until
from tests.support.media.media_files import saved
from tests.support.worker.diffusion_worker import (
    VIDEOS,
    Setup,
    Stream,
    diffusion_worker,
    opened,
    streaming,
)

STEPS = 2
PERMITS = STEPS + 1
"""What one request with `STEPS` takes of a `SteppedDiffuser`."""
NOISE = saved(Image.effect_noise((1024, 1024), 200).convert("RGB"), "PNG")
LARGE: dict[str, Any] = {
    "n": 4,
    "width": 1024,
    "height": 1024,
    "steps": 1,
    "input_image": {"data": NOISE, "strength": 1.0},
}
"""Some 8 MB of files; gRPC and the session take less than twice that for one who doesn't read."""


async def test_fifty_requests_run_in_order_and_know_their_positions() -> None:
    async with streaming() as (one, stream):
        one.engine.by_hand()
        for slot in range(50):
            await stream.start(slot, seed=slot, steps=STEPS)
        await until(lambda: all(stream.slots[s].positions == [s] for s in range(1, 50)))
        for running in range(50):
            await until(lambda r=running: stream.slots[r].steps == [(0, 0, STEPS)])  # type: ignore[misc]
            await until(
                lambda r=running: all(  # type: ignore[misc]
                    stream.slots[s].positions[-1] == s - r for s in range(r + 1, 50)
                )
            )
            one.engine.allow(PERMITS)
            await stream.finished(running)
        assert stream.order == list(range(50))
        assert [job.seed for job in one.engine.jobs] == list(range(50))
        # Each saw each number once: nothing was left out, nothing invented.
        assert all(stream.slots[s].positions == list(range(s, 0, -1)) for s in range(50))


async def test_a_waiting_request_that_is_cancelled_leaves_the_queue_at_once() -> None:
    async with streaming() as (one, stream):
        one.engine.by_hand()
        for slot in range(4):
            await stream.start(slot, steps=STEPS)
        await until(lambda: stream.slots[3].positions == [3])
        await stream.cancel(1)
        assert (await stream.ended(1)).reason == "CANCELLED"
        await until(lambda: stream.slots[3].positions == [3, 2])
        assert stream.slots[2].positions == [2, 1]
        one.engine.allow(3 * PERMITS)
        for slot in (0, 2, 3):
            await stream.finished(slot)
        assert len(one.engine.jobs) == 3


async def test_a_running_request_that_is_cancelled_frees_the_device_within_a_step() -> None:
    async with streaming() as (one, stream):
        one.engine.by_hand()
        await stream.start(0, steps=50)
        await stream.start(1, steps=STEPS)
        one.engine.allow(5)
        await until(lambda: (0, 5, 50) in stream.slots[0].steps)
        done = one.engine.progress(0)
        await stream.cancel(0)
        assert (await stream.ended(0)).reason == "CANCELLED"
        await until(lambda: stream.slots[1].steps == [(0, 0, STEPS)])
        assert one.engine.progress(0) == done
        await stream.start(0, steps=STEPS)  # the slot is free again
        one.engine.allow(2 * PERMITS)
        await stream.finished(1)
        await stream.finished(0)
        await stream.cancel(0)  # has no effect
        await one.until_load(0, 0)


async def test_a_caller_that_reads_nothing_holds_up_nobody_and_can_cancel() -> None:
    setup = Setup(max_open_pixel_steps=1 << 30)
    async with diffusion_worker(setup) as one, opened(one) as other:
        silent = Stream(one.stub)
        await silent.start(0, **LARGE)
        await silent.start(1, **LARGE)
        await until(lambda: len(one.engine.jobs) == 8)
        await one.until_load(0, 0)  # made, and not yet delivered
        await other.start(0)
        await other.finished(0)
        still_open = await one.open_requests()
        await silent.cancel(1)  # the later one: of the first nearly all may be on its way
        await one.until_open(still_open - 1)
        silent.read_on()
        assert (await silent.ended(1)).reason == "CANCELLED"
        assert (await silent.finished(0)).complete == {0, 1, 2, 3}
        await silent.close()


async def test_a_caller_that_goes_away_stops_its_requests() -> None:
    async with diffusion_worker() as one, opened(one) as other:
        one.engine.by_hand()
        gone = Stream(one.stub)
        gone.read_on()
        for slot in range(3):
            await gone.start(slot, steps=STEPS)
        await until(lambda: gone.slots[2].positions == [2])
        await other.start(0, steps=STEPS)
        await until(lambda: other.slots[0].positions == [3])
        await gone.close()
        await until(lambda: other.slots[0].steps == [(0, 0, STEPS)])
        one.engine.allow(PERMITS)
        await other.finished(0)
        assert len(one.engine.jobs) == 2


async def test_open_requests_end_when_the_caller_has_closed_its_side() -> None:
    async with streaming() as (_, stream):
        for slot in range(3):
            await stream.start(slot)
        await stream.call.done_writing()
        for slot in range(3):
            await stream.finished(slot)


async def test_a_deadline_ends_a_request_that_waits_and_one_that_runs() -> None:
    async with streaming() as (one, stream):
        one.engine.by_hand()
        soon, passed = Duration(), Duration()
        soon.FromMilliseconds(300)
        passed.FromMilliseconds(0)
        await stream.start(0, timeout=soon, steps=STEPS)
        await stream.start(1, timeout=soon, steps=STEPS)
        await stream.start(2, timeout=passed, steps=STEPS)
        await stream.start(3, steps=STEPS)
        for slot in range(3):
            assert (await stream.ended(slot)).reason == "DEADLINE_EXCEEDED"
        one.engine.allow(PERMITS)
        await stream.finished(3)


async def test_a_request_that_the_engine_fails_ends_alone() -> None:
    async with streaming() as (one, stream):
        broken = EngineFailedError("the step failed")
        one.engine.fault = lambda job, step: broken if (job.seed, step) == (8, 2) else None
        await stream.start(0, seed=7, n=2)
        await stream.start(1, seed=7)
        assert (await stream.ended(0)).reason == "ENGINE_FAILED"
        assert stream.slots[0].error is not None
        assert stream.slots[0].error.retryable
        await stream.finished(1)


async def test_a_bug_in_one_request_is_told_with_an_id_and_ends_alone() -> None:
    async with streaming() as (one, stream):

        def broken(job: Job, _: int) -> None:
            if job.seed == 13:
                raise ZeroDivisionError

        one.engine.fault = broken
        await stream.start(0, seed=13)
        await stream.start(1, seed=7)
        view = await stream.ended(0)
        assert view.reason == "INTERNAL"
        assert view.error is not None
        assert view.error.error_id in view.message
        assert "zero" not in view.message
        await stream.finished(1)


async def test_an_input_image_that_is_still_decoded_holds_up_nobody(
    monkeypatch: Any,
) -> None:
    async with streaming() as (one, stream):
        decoding, decoded = asyncio.Event(), asyncio.Event()

        async def slow(_: bytes, width: int, height: int) -> Frames:
            await decoding.wait()
            decoded.set()
            pixels = memoryview(bytes(width * height * 3))
            return Frames(modality=Modality.IMAGE, width=width, height=height, data=pixels)

        monkeypatch.setattr(one.hosted, "decode", slow)
        one.engine.by_hand()
        await stream.start(0, steps=STEPS, seed=0, input_image={"data": NOISE, "strength": 1.0})
        await stream.start(1, steps=STEPS, seed=1)
        await until(lambda: stream.slots[1].steps == [(0, 0, STEPS)])
        assert stream.slots[0].positions == [1]
        await stream.start(2, steps=STEPS, seed=2)
        await until(lambda: stream.slots[2].positions == [2])
        decoding.set()
        await decoded.wait()
        one.engine.allow(3 * PERMITS)
        for slot in (0, 1, 2):
            await stream.finished(slot)
        assert [job.seed for job in one.engine.jobs] == [1, 0, 2]


async def test_limits_on_what_is_open_are_told_in_pixel_steps() -> None:
    cost = 64 * 64 * STEPS
    async with streaming(Setup(max_open_pixel_steps=3 * cost), max_open_requests=3) as (
        one,
        stream,
    ):
        one.engine.by_hand()
        await stream.start(0, steps=STEPS)
        await until(lambda: bool(stream.slots[0].steps))
        await stream.start(1, steps=STEPS, n=3)
        view = await stream.ended(1)
        assert (view.reason, view.fields) == ("OVERLOADED", [])
        assert f"{3 * cost} more pixel steps" in view.message
        assert f"would exceed the {3 * cost} that may be open" in view.message
        for slot in (2, 3):
            await stream.start(slot, steps=STEPS)
        await until(lambda: stream.slots[3].positions == [2])
        await stream.start(4, steps=1)
        assert "3 requests are open" in (await stream.ended(4)).message
        one.engine.allow(3 * PERMITS)
        for slot in (0, 2, 3):
            await stream.finished(slot)


async def test_videos_wait_in_the_same_kind_of_queue() -> None:
    async with streaming(VIDEOS) as (one, stream):
        one.engine.by_hand()
        await stream.start(0, steps=STEPS)
        await stream.start(1, steps=STEPS)
        await until(lambda: stream.slots[1].positions == [1])
        await stream.cancel(0)
        assert (await stream.ended(0)).reason == "CANCELLED"
        one.engine.allow(PERMITS)
        assert (await stream.finished(1)).complete == {0}
        assert one.hosted.info.kinds == {Kind.VIDEO}
