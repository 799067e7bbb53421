"""A request for images or videos, its settings with the defaults filled in, and its output."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from millstream_server.runtime.priority import Priority
from millstream_server.runtime.telemetry.trace_context import NOT_TRACED, TraceContext

MAX_SEED = (1 << 63) - 1
DEFAULT_STRENGTH = 0.6
MAX_INPUT_BYTES = 16 << 20
"""Of an input image's file."""


class Kind(enum.Enum):
    """What is made."""

    IMAGE = "image"
    VIDEO = "video"


class FileFormat(enum.Enum):
    """Format of the files; the values are media types."""

    PNG = "image/png"
    WEBP = "image/webp"
    MP4 = "video/mp4"


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffusionRequest:
    """A request; None and "" mean that the caller didn't say."""

    kind: Kind
    prompt: str
    negative_prompt: str = ""
    n: int | None = None
    width: int | None = None
    height: int | None = None
    steps: int | None = None
    guidance_scale: float | None = None
    seed: int | None = None
    scheduler: str = ""
    preview_every_steps: int | None = None
    to_url: bool = False
    """Write the files to storage and return URLs."""
    format: FileFormat = FileFormat.PNG
    input_image: bytes = b""
    """The file of an image to start from; images only."""
    strength: float | None = None
    """How far the output may go away from the input image, above 0 to 1."""
    frames: int | None = None
    """Videos only."""
    fps: int | None = None
    """Videos only: frames per second."""
    model: str = ""
    request_id: str = ""
    priority: Priority = Priority.NORMAL
    trace: TraceContext = NOT_TRACED
    deadline_s: float | None = None
    """On the clock of `time.monotonic`; None: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffusionSettings:
    """What outputs are made with."""

    model: str
    width: int
    height: int
    steps: int
    guidance_scale: float
    seed: int
    """Of the first output; output i uses `seed_of(i)`."""
    scheduler: str
    frames: int = 0
    """0: images."""
    fps: int = 0
    strength: float | None = None
    """None: no input image."""

    def seed_of(self, output: int) -> int:
        return (self.seed + output) & MAX_SEED

    @property
    def pixel_steps(self) -> int:
        """Pixels x frames x steps of one output: what admission counts."""
        return self.width * self.height * max(1, self.frames) * self.steps


MAX_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a request is; only the latest is of interest."""

    queue_position: int = 0
    """Requests that run before it, the running one included; 0: it runs."""
    output: int = 0
    step: int = 0
    """Steps of this output that are done."""
    steps: int = 0
    elapsed_s: float = 0.0
    """Since the request began to run."""
    preview: bytes = b""
    """A small WebP image."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """The next bytes of a file, at most `MAX_CHUNK_BYTES`."""

    output: int
    data: bytes
    last: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputFile:
    """One finished file."""

    seed: int
    total_bytes: int
    format: FileFormat
    url: str = ""
    """Where it is; empty: its bytes were sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A request's good end."""

    request_id: str
    settings: DiffusionSettings
    outputs: tuple[OutputFile, ...]
    steps: int
    """Steps that were run, over all outputs."""
    pixel_steps: int
    prompt_tokens: int
    queued_s: float
    running_s: float
