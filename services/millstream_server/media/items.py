"""Images and videos in plain types: files, frames, what encoders make of them, prompts' items."""

from __future__ import annotations

import enum
import hashlib
import math
import time
from collections.abc import Iterable
from dataclasses import dataclass

from millstream_server.media.tensor import Tensor, TensorSpec
from millstream_server.runtime.telemetry.trace_context import NOT_TRACED, TraceContext

MAX_MEDIA_ITEMS = 256
"""Most images and videos of one prompt."""
DIGEST_BYTES = 32


class Modality(enum.Enum):
    """A kind of media; the values are SGLang's names."""

    IMAGE = "image"
    VIDEO = "video"


class Content(enum.Enum):
    """What a tensor holds that an encoder made of an item."""

    ROWS = "rows"
    """Embeddings, [tokens, width]."""
    PIXELS = "pixels"
    """Preprocessed pixels, for an engine that runs the vision tower itself."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """What position ids are computed from (M-RoPE); empty for models without."""

    grid: tuple[int, int, int] | None = None
    """Patches in time, height and width, before they are merged."""
    seconds_per_step: float = 0.0
    """Video, models that space positions by time (Qwen2.5-VL): seconds between two grid steps."""
    timestamps_s: tuple[float, ...] = ()
    """Video, models that write times into the prompt (Qwen3-VL): seconds of each grid step."""


@dataclass(frozen=True, slots=True)
class Span:
    """A run of placeholder tokens in a prompt."""

    start: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingTicket:
    """Lets a worker fetch one tensor from an encode worker; see media.proto."""

    address: str
    lease: str
    tensor: TensorSpec
    content: Content = Content.ROWS
    expires_at_ms: int = 0
    """Unix time."""
    signature: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedItem:
    """What an encode worker made of an item, as the Processor gets it (`EmbeddingRef`)."""

    modality: Modality
    digest: bytes
    """SHA-256 of bytes, processor settings, weights and salt; made by the encode worker."""
    tokens: int
    """Placeholder tokens that it takes."""
    geometry: Geometry
    tensor: TensorSpec
    content: Content
    lease: str
    cached: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaInput:
    """One item of a prompt, whose placeholders are already expanded."""

    modality: Modality
    spans: tuple[Span, ...]
    """Its placeholders; an image has one span, a video may have one per grid step."""
    geometry: Geometry
    digest: bytes
    ticket: EmbeddingTicket | None = None
    """Where to fetch the tensor; None on a decode worker, which needs the geometry only."""
    content: Content = Content.ROWS
    tensor: Tensor | None = None
    """Filled in by the worker when it has fetched it."""

    @property
    def tokens(self) -> int:
        return sum(span.length for span in self.spans)

    def positions(self, per_second: float) -> int:
        """Count its positions (M-RoPE): those of its longest side, ``per_second`` in time.

        0: they don't depend on time and are never more than the tokens, which are returned.
        """
        grid, tokens = self.geometry.grid, self.tokens
        if not per_second or grid is None or not tokens:
            return tokens
        steps, height, width = grid
        merge = math.isqrt(math.prod(grid) // tokens) or 1
        seconds = min(1 << 31, steps * self.geometry.seconds_per_step)  # longer than any video
        return max(1, height // merge, width // merge, math.ceil(seconds * per_second))


def cache_key(items: Iterable[MediaInput]) -> int:
    """Return the unsigned 64-bit number by which an engine's prefix cache knows these items.

    It covers the items' digests in order, kinds and geometry: equal placeholders of different
    media never share a cache entry.
    """
    hashed = hashlib.sha256(b"millstream.media")
    for item in items:
        hashed.update(item.digest)
        hashed.update(repr((item.modality.value, item.geometry, item.content.value)).encode())
    return int.from_bytes(hashed.digest()[:8], "big")


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaLimits:
    """What is refused with a sentence. Sizes come from the file's header, before decoding."""

    max_item_bytes: int = 64 << 20
    """Most bytes of a file."""
    max_pixels: int = 36_000_000
    """Most pixels of an image, or of a video's frame: width x height."""
    max_frames: int = 128
    """Most frames that are read of a video; a longer one is sampled evenly."""
    max_video_frames: int = 20_000
    """Most frames that a video may have."""
    max_video_s: float = 600.0
    """Longest video."""
    fps: float = 2.0
    """Frames read per second of video, as the models were trained."""
    max_decoded_bytes: int = 1 << 30
    """Most bytes of the frames that are read of a file: width x height x 3 for each."""
    decode_timeout_s: float = 20.0
    """A decoder that takes longer is killed."""
    decode_memory_bytes: int = 2 << 30
    """Address space of a decoder process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frames:
    """A decoded image or video: RGB, 8 bits, upright."""

    modality: Modality
    width: int
    height: int
    data: memoryview
    """[frames, height, width, 3] bytes; an image has one frame."""
    count: int = 1
    fps: float = 0.0
    """Video: frames per second of the file."""
    total_frames: int = 1
    """Video: frames in the file."""
    indices: tuple[int, ...] = (0,)
    """Video: which of the file's frames these are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaFile:
    """A file, and how it is to be encoded."""

    modality: Modality
    data: bytes | memoryview
    """The file."""
    sha256: bytes
    """SHA-256 of ``data``."""
    salt: str = ""
    """Callers with different salts share no cached results."""
    request_id: str = ""
    """The client's id for logs and traces: any text, not unique."""
    trace: TraceContext = NOT_TRACED
    deadline_s: float | None = None
    """The caller's deadline on the clock of `time.monotonic`; None: no deadline."""

    @property
    def time_left_s(self) -> float | None:
        """Seconds until the deadline, negative after it; None: no deadline."""
        return None if self.deadline_s is None else self.deadline_s - time.monotonic()
