"""A deterministic engine for images and videos: pixels to work out by hand, a timing model.

The rule: the SHA-256 of what the output depends on gives three bytes, its colour. In row y of frame
n every pixel has the red value of the colour plus y, the green value plus n, and the blue value,
each modulo 256. With an input image each byte is XORed with the image's. By hand:

    text = "prompt|negative prompt|width|height|steps|guidance|seed|scheduler|frames|strength"
    red, green, blue = hashlib.sha256(text.encode()).digest()[:3]
    row = bytes([(red + y) % 256, (green + n) % 256, blue]) * width

Guidance and strength are written as Python writes floats; the strength is 0.0 without an input
image. The preview of a step is the first frame of the same job with so many steps. No torch, no
numpy.

It is part of the package: for contract tests, demonstrations and scale tests.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from millstream_server.control.engine import EngineLoad
from millstream_server.diffusion.diffuser import DiffuserInfo, Job, Step
from millstream_server.diffusion.request import Kind
from millstream_server.media.items import Frames, Modality
from millstream_server.runtime.errors import EngineFailedError, InternalError, ServingError

_KEPT_JOBS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedDiffuserConfig:
    """The simulated model and machine."""

    kinds: frozenset[Kind] = frozenset({Kind.IMAGE})
    image_to_image: bool = True
    negative_prompts: bool = True
    default_size: int = 64
    size_step: int = 16
    load_s: float = 0.0
    step_s: float = 0.0
    """Seconds per denoising step, of any size."""


class SimulatedDiffuser:
    """Satisfies `diffusion.diffuser.Diffuser`. A test sets `fault`, and calls `wedge` or `die`."""

    def __init__(self, config: SimulatedDiffuserConfig | None = None) -> None:
        self.config = config or SimulatedDiffuserConfig()
        self.fault: Callable[[Job, int], ServingError | None] = lambda _job, _step: None
        """Returns the error with which a step (from 1) of a job fails, None: it doesn't."""
        self.jobs: deque[Job] = deque(maxlen=_KEPT_JOBS)
        """The last jobs that began."""
        self._steps = 0
        self._running: asyncio.Task[object] | None = None
        self._going = asyncio.Event()
        self._going.set()
        self._failed: EngineFailedError | None = None
        self._on_failure: Callable[[ServingError], None] | None = None

    async def start(self, on_failure: Callable[[ServingError], None]) -> DiffuserInfo:
        config = self.config
        self._on_failure = on_failure
        await asyncio.sleep(config.load_s)
        videos = Kind.VIDEO in config.kinds
        return DiffuserInfo(
            engine="simulated",
            engine_version="1",
            max_running_requests=1,
            kinds=config.kinds,
            default_width=config.default_size,
            default_height=config.default_size,
            size_step=config.size_step,
            min_size=config.size_step,
            max_pixels=1 << 22,
            default_steps=4,
            max_steps=100,
            default_guidance_scale=1.0,
            max_outputs=64,
            max_prompt_tokens=77,
            schedulers=("simulated", "other"),
            image_to_image=config.image_to_image,
            negative_prompts=config.negative_prompts,
            default_frames=9 if videos else 0,
            max_frames=81 if videos else 0,
            frame_step=4 if videos else 1,
            default_fps=16 if videos else 0,
        )

    async def warm_up(self) -> None:
        await self.probe(0)

    def progress(self, dp_rank: int) -> int:
        return self._steps

    async def probe(self, dp_rank: int) -> None:
        """Run one step; a hang stops it, faults and `jobs` don't know it."""
        await self._step()

    async def load(self) -> EngineLoad:
        return EngineLoad(running_requests=int(self._running is not None))

    async def close(self) -> None:
        """End a hang; the running job fails."""
        self._end(EngineFailedError("The engine was closed."))

    def wedge(self) -> None:
        """Simulate a hang: steps don't end. A cancel ends a job all the same."""
        self._going.clear()

    def unwedge(self) -> None:
        self._going.set()

    def die(self) -> None:
        """Simulate the engine's end: the running job fails, and all that come."""
        error = EngineFailedError("The simulated engine died.")
        self._end(error)
        on_failure, self._on_failure = self._on_failure, None
        if on_failure is not None:
            on_failure(error)

    def _end(self, error: EngineFailedError) -> None:
        self._failed = self._failed or error
        self._going.set()

    def count_tokens(self, prompt: str) -> int:
        return len(prompt.split())

    async def diffuse(self, job: Job, on_step: Callable[[Step], None]) -> Frames:
        if self._running is not None:
            raise InternalError("two jobs at once")
        self._running = asyncio.current_task()
        try:
            self.jobs.append(job)
            of = steps_of(job)
            for done in range(1, of + 1):
                if (fault := self.fault(job, done)) is not None:
                    raise fault
                await self._step()
                every = job.preview_every_steps
                shown = _preview(job, done) if every and done % every == 0 else None
                on_step(Step(done, of, shown))
            return pixels_of(job)
        finally:
            self._running = None

    async def _step(self) -> None:
        await asyncio.sleep(self.config.step_s)
        await self._going.wait()
        if self._failed is not None:
            raise self._failed
        self._steps += 1


def steps_of(job: Job) -> int:
    """Return how many steps a job runs: with an input image about strength x steps."""
    if job.input_image is None:
        return job.steps
    left_out = int(job.steps - min(job.steps * job.strength, job.steps))
    return job.steps - left_out


def pixels_of(job: Job) -> Frames:
    """Return a job's output by the rule at the head of this module."""
    strength = 0.0 if job.input_image is None else job.strength
    of_all = (job.prompt, job.negative_prompt, job.width, job.height, job.steps)
    settings = (float(job.guidance_scale), job.seed, job.scheduler, job.frames, strength)
    text = "|".join(map(str, of_all + settings))
    red, green, blue = hashlib.sha256(text.encode()).digest()[:3]
    data = b"".join(
        bytes([(red + y) % 256, (green + n) % 256, blue]) * job.width
        for n in range(job.frames)
        for y in range(job.height)
    )
    if job.input_image is not None:
        data = _xor(data, bytes(job.input_image.data))
    return Frames(
        modality=Modality.IMAGE if job.frames == 1 else Modality.VIDEO,
        width=job.width,
        height=job.height,
        data=memoryview(data),
        count=job.frames,
        total_frames=job.frames,
        indices=tuple(range(job.frames)),
    )


def _preview(job: Job, done: int) -> Frames:
    whole = pixels_of(replace(job, steps=done))
    first = whole.data[: 3 * job.width * job.height]
    return Frames(modality=Modality.IMAGE, width=job.width, height=job.height, data=first)


def _xor(one: bytes, other: bytes) -> bytes:
    mixed = int.from_bytes(one, "big") ^ int.from_bytes(other, "big")
    return mixed.to_bytes(len(one), "big")
