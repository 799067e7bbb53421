"""An image or a video: what an encoder makes of it, and what it is in a prompt."""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

from millstream_server.media.tensor import Tensor, TensorSpec

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
        """Placeholder tokens that it takes."""
        return sum(span.length for span in self.spans)


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
