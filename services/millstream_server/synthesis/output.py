"""What comes back for a request for images or videos."""

from __future__ import annotations

from dataclasses import dataclass

from millstream_server.synthesis.request import DiffusionSettings, FileFormat

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
