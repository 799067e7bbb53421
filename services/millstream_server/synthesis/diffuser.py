"""The Protocol of an engine that makes images or videos; adapters satisfy it structurally."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from millstream_server.engines.base import Engine, EngineInfo, Probeable, Role, Task
from millstream_server.media.frames import Frames
from millstream_server.runtime.errors import OverloadedError, ServingError
from millstream_server.synthesis.request import Kind

TASK_OF_KIND = {Kind.IMAGE: Task.GENERATE_IMAGE, Kind.VIDEO: Task.GENERATE_VIDEO}


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffuserInfo(EngineInfo):
    """Facts about a started engine, and its limits; the worker may narrow the limits."""

    kinds: frozenset[Kind]
    default_width: int
    default_height: int
    size_step: int
    """Width and height are multiples of it."""
    min_size: int
    """Least width and height."""
    max_pixels: int
    """Most width x height."""
    default_steps: int
    max_steps: int
    default_guidance_scale: float
    max_outputs: int
    max_prompt_tokens: int
    schedulers: tuple[str, ...]
    """Names that a request may use, the model's own first."""
    image_to_image: bool = False
    negative_prompts: bool = True
    urls: bool = False
    """Whether the worker has storage; it sets this itself."""
    default_frames: int = 0
    """Videos: frames when a request names none."""
    max_frames: int = 0
    frame_step: int = 1
    """Videos: frames are one more than a multiple of it."""
    default_fps: int = 0

    def tasks(self, role: Role) -> frozenset[Task]:
        """See `EngineInfo.tasks`."""
        return frozenset(TASK_OF_KIND[kind] for kind in self.kinds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One output, checked against the engine's info."""

    prompt: str
    negative_prompt: str
    width: int
    height: int
    steps: int
    guidance_scale: float
    seed: int
    scheduler: str
    frames: int = 1
    input_image: Frames | None = None
    """One RGB frame of exactly width x height."""
    strength: float = 1.0
    preview_every_steps: int = 0
    """0: no previews."""
    request_id: str = ""


@dataclass(frozen=True, slots=True)
class Step:
    """One denoising step is done."""

    done: int
    """Steps that are done, from 1."""
    of: int
    """Steps that this job runs: with an input image fewer than `Job.steps`."""
    preview: Frames | None = None
    """The output as it would be now; of a video its first frame."""


def too_little_memory(job: Job) -> OverloadedError:
    """Return the failure of a job that ran out of memory."""
    size = f"{job.width} x {job.height} pixels"
    if job.frames > 1:
        size += f" and {job.frames} frames"
    return OverloadedError(f"The worker has too little memory for {size} now.")


class Diffuser(Engine, Probeable, Protocol):
    """An engine that makes images or videos, one at a time.

    The caller never overlaps `diffuse`, `probe` and `warm_up`: it keeps the queue.
    """

    async def start(self, on_failure: Callable[[ServingError], None]) -> DiffuserInfo:
        """See `Engine.start`."""
        ...

    def count_tokens(self, prompt: str) -> int:
        """Return how many tokens the text encoder reads of a prompt, uncut."""
        ...

    async def diffuse(self, job: Job, on_step: Callable[[Step], None]) -> Frames:
        """Make one output: `Job.frames` RGB frames of the job's size.

        ``on_step`` is called on the event loop. The same job gives the same pixels. Cancelling the
        call ends the work within one denoising step; the call ends only when the engine is free
        for the next job.

        Raises:
            ServingError: it failed; the engine can take the next job, unless it called
            ``on_failure``.
        """
        ...
