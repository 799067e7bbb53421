"""The Protocol of an engine that makes images or videos; adapters satisfy it structurally.

What a model's maker says of its use: `millstream.json` in the folder of a pipeline.

Every key is optional; all values but `guidance_scale` are whole numbers.

| Key | What it is |
|---|---|
| `width`, `height` | size when a request names none |
| `max_pixels` | most width x height |
| `steps` | denoising steps when a request names none |
| `max_steps` | most steps |
| `guidance_scale` | guidance when a request names none, 0 to 100 |
| `max_prompt_tokens` | most tokens of a prompt; longer ones are refused, not cut |
| `frames`, `fps` | videos: frames and frames per second when a request names none |
| `max_frames` | videos: most frames |
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from millstream_server.control.engine import Engine, EngineInfo, Probeable, Role, Task
from millstream_server.diffusion.request import Kind
from millstream_server.media.items import Frames
from millstream_server.runtime.errors import InvalidRequestError, OverloadedError, ServingError

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
        return frozenset(TASK_OF_KIND[kind] for kind in self.kinds)


@dataclass(frozen=True, slots=True)
class ImageDefaults:
    """What images have whose request doesn't say it."""

    width: int
    height: int
    steps: int


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


def probe_job(info: DiffuserInfo) -> Job:
    """Return the smallest job, of one step, as canaries run it."""
    return Job(
        prompt="",
        negative_prompt="",
        width=info.min_size,
        height=info.min_size,
        steps=1,
        guidance_scale=info.default_guidance_scale,
        seed=0,
        scheduler=info.schedulers[0],
        request_id="probe",
    )


def check_sides(job: Job, longest: int | None) -> None:
    """Check a job's width and height; ``longest`` None: there is no limit.

    Raises:
        InvalidRequestError: one is above the longest side that the model can make.
    """
    for name, side in (("width", job.width), ("height", job.height)):
        if longest is not None and side > longest:
            raise InvalidRequestError.of(
                f"options.{name}",
                f"{side} is above {longest}, the longest side that the model can make",
            )


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


FILE_NAME = "millstream.json"
MAX_GUIDANCE_SCALE = 100.0


class ModelDefaultsError(ValueError):
    """The file is wrong; the text says where."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDefaults:
    """The file's values; None: it doesn't say."""

    width: int | None = None
    height: int | None = None
    max_pixels: int | None = None
    steps: int | None = None
    max_steps: int | None = None
    guidance_scale: float | None = None
    max_prompt_tokens: int | None = None
    frames: int | None = None
    fps: int | None = None
    max_frames: int | None = None


def read_model_defaults(folder: Path) -> ModelDefaults:
    """Read a pipeline's file; without one every value is None.

    Raises:
        ModelDefaultsError: it isn't JSON, or has an unknown key or a value of the wrong kind.
    """
    file = folder / FILE_NAME
    if not file.is_file():
        return ModelDefaults()
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelDefaultsError(f"{FILE_NAME} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ModelDefaultsError(f"{FILE_NAME} is not a JSON object")
    known = [field.name for field in dataclasses.fields(ModelDefaults)]
    unknown = [key for key in values if key not in known]
    if unknown:
        raise ModelDefaultsError(f"{FILE_NAME}: unknown {unknown}; known are {', '.join(known)}")
    for key, value in values.items():
        _check(key, value)
    if ("width" in values) != ("height" in values):
        raise ModelDefaultsError(f"{FILE_NAME}: width and height go together")
    return ModelDefaults(**values)


def _check(key: str, value: Any) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if key == "guidance_scale":
        if not number or not 0 <= value <= MAX_GUIDANCE_SCALE:
            message = f"{FILE_NAME}: {key} is {value!r}, not a number from 0 to 100"
            raise ModelDefaultsError(message)
    elif not number or not isinstance(value, int) or value < 1:
        raise ModelDefaultsError(f"{FILE_NAME}: {key} is {value!r}, not a whole number above 0")
