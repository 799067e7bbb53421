"""The simulated engine's rule, by hand, and its switches."""

from __future__ import annotations

import asyncio
import hashlib
from typing import Any

import pytest

from millstream_server.diffusion.diffuser import Job, Step
from millstream_server.engines.simulated.diffuser import SimulatedDiffuser
from millstream_server.media.items import Frames, Modality
from millstream_server.runtime.errors import EngineFailedError, InternalError, ServingError


def _job(**changes: Any) -> Job:
    given: dict[str, Any] = {"prompt": "a cat", "negative_prompt": "dark", "width": 2, "height": 3}
    given |= {"steps": 4, "guidance_scale": 2, "seed": 5, "scheduler": "simulated"}
    return Job(**(given | changes))


async def test_a_video_by_hand() -> None:
    made = await SimulatedDiffuser().diffuse(_job(frames=5), lambda _: None)
    text = b"a cat|dark|2|3|4|2.0|5|simulated|5|0.0"
    red, green, blue = hashlib.sha256(text).digest()[:3]
    wanted = [
        value
        for n in range(5)
        for y in range(3)
        for _ in range(2)
        for value in ((red + y) % 256, (green + n) % 256, blue)
    ]
    assert list(made.data) == wanted
    assert (made.modality, made.count, made.indices) == (Modality.VIDEO, 5, (0, 1, 2, 3, 4))


async def test_an_image_from_an_image_by_hand() -> None:
    given = bytes(range(18))
    frame = Frames(modality=Modality.IMAGE, width=2, height=3, data=memoryview(given))
    job = _job(input_image=frame, strength=0.5, preview_every_steps=1)
    steps: list[Step] = []
    made = await SimulatedDiffuser().diffuse(job, steps.append)
    text = b"a cat|dark|2|3|4|2.0|5|simulated|1|0.5"
    red, green, blue = hashlib.sha256(text).digest()[:3]
    rows = [bytes([(red + y) % 256, green, blue]) * 2 for y in range(3)]
    assert bytes(made.data) == bytes(a ^ b for a, b in zip(b"".join(rows), given, strict=True))
    assert [(step.done, step.of) for step in steps] == [(1, 2), (2, 2)]


async def test_a_hang_holds_jobs_and_probes_until_it_ends() -> None:
    engine = SimulatedDiffuser()
    engine.wedge()
    job = asyncio.ensure_future(engine.diffuse(_job(), lambda _: None))
    probe = asyncio.ensure_future(engine.probe(0))
    await asyncio.wait({job, probe}, timeout=0.01)
    assert engine.progress(0) == 0
    assert (await engine.load()).running_requests == 1
    with pytest.raises(InternalError, match="two jobs"):
        await engine.diffuse(_job(), lambda _: None)
    engine.unwedge()
    await asyncio.gather(job, probe)
    assert engine.progress(0) == 5
    assert list(engine.jobs) == [_job()]


async def test_a_fault_fails_the_step_that_it_names() -> None:
    engine = SimulatedDiffuser()
    engine.fault = lambda job, step: InternalError("at 3") if (job.seed, step) == (5, 3) else None
    steps: list[Step] = []
    with pytest.raises(InternalError, match="at 3"):
        await engine.diffuse(_job(), steps.append)
    assert len(steps) == 2
    await engine.diffuse(_job(seed=6), steps.append)


async def test_its_death_fails_what_runs_and_what_comes() -> None:
    engine, told = SimulatedDiffuser(), list[ServingError]()
    await engine.start(told.append)
    engine.wedge()
    job = asyncio.ensure_future(engine.diffuse(_job(), lambda _: None))
    await asyncio.sleep(0)
    engine.die()
    engine.die()
    for waited in (job, engine.probe(0), engine.diffuse(_job(), lambda _: None)):
        with pytest.raises(EngineFailedError, match="died"):
            await waited
    assert [type(error) for error in told] == [EngineFailedError]
