"""The Protocol of a vision tower: the part that differs between encoders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from millstream_server.encoding.encoder import Prepared
from millstream_server.media.families.family import Family
from millstream_server.media.items import Content, Modality

Device = Literal["auto", "cpu", "cuda"]
ElementChoice = Literal["auto", "float32", "bfloat16", "float16"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerConfig:
    """Settings of an encoder."""

    model_path: Path
    device: Device = "auto"
    """"auto" uses the GPU where there is one."""
    dtype: ElementChoice = "auto"
    """Type of the weights and the rows; "auto" is bfloat16 on a GPU and float32 on the CPU."""
    max_item_tokens: int = 16384
    """An item that takes more placeholder tokens is refused."""
    max_running_items: int = 32
    """Items at once, encoding or waiting, with which the worker is fully used."""
    warm_up_timeout_s: float = 120.0


@dataclass(frozen=True, slots=True)
class PixelInputs:
    """What `Prepared.inputs` is: the processor's tensors of one item."""

    pixels: Any
    """[patches, values], or [1, colours, height, width] for families without a grid."""
    grid: Any
    """[1, 3], or None for families without."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerFacts:
    """What a loaded tower is."""

    engine: str
    version: str
    kind: str
    """What its rows depend on besides model and processor, such as its type of numbers."""


class Tower(Protocol):
    """A vision tower; every call comes from the same thread."""

    @property
    def content(self) -> Content:
        """What it makes."""
        ...

    def supports(self, family: Family) -> str | None:
        """Return why it can't run the family's tower, or None."""
        ...

    def load(self, family: Family) -> TowerFacts:
        """Load the weights. Anything may be raised."""
        ...

    def run(self, modality: Modality, batch: Sequence[Prepared]) -> Sequence[Any]:
        """Return a torch tensor per item, on any device. Anything may be raised."""
        ...

    def close(self) -> None:
        """Release everything, also after a failed `load`."""
        ...
