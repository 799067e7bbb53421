"""The Protocol of an engine that encodes images and videos; adapters satisfy it structurally."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from millstream_server.control.engine import Engine, EngineInfo, Probeable
from millstream_server.media.decoding.sampling import FrameSampling
from millstream_server.media.items import Content, Frames, Geometry, MediaLimits, Modality
from millstream_server.media.tensor import Tensor
from millstream_server.runtime.errors import ServingError


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderInfo(EngineInfo):
    """Facts about a started encoder."""

    modalities: frozenset[Modality]
    content: Content = Content.ROWS
    settings_digest: bytes = b""
    """SHA-256 of the model's processor settings, its weights and the encoder's kind.

    A part of every result's digest.
    """
    max_item_tokens: int = 0
    """Most placeholder tokens of an item; 0: no limit of its own."""
    sampling: FrameSampling = FrameSampling.LINSPACE
    """Which frames of a video the model sees."""
    limits: MediaLimits = field(default_factory=MediaLimits)
    """What is refused before it is decoded; the worker sets it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """An item after the model's own image or video processor."""

    modality: Modality
    tokens: int
    geometry: Geometry
    inputs: Any
    """The tower's input; only the encoder that made it reads it."""
    cost: int
    """How much work it is, in patches: bounds a batch."""


class MediaEncoder(Engine, Probeable, Protocol):
    """An engine that encodes media.

    `prepare` and `encode` block: call them in threads. `prepare` may run in several threads at
    once, `encode` in one at a time. Neither keeps a reference to its arguments.
    """

    async def start(self, on_failure: Callable[[ServingError], None]) -> EncoderInfo:
        """See `Engine.start`."""
        ...

    def prepare(self, frames: Frames) -> Prepared:
        """Run the model's own processor.

        Raises:
            InvalidRequestError: the model can't take this item (field ``data``), such as an extreme
            aspect ratio.
        """
        ...

    def encode(self, batch: Sequence[Prepared]) -> list[Tensor]:
        """Run the vision tower over items of one modality; one tensor per item, in order.

        Raises:
            ServingError: the tower failed; none of the items is encoded.
        """
        ...
