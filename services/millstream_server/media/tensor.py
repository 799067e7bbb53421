"""Tensors as plain data: a type, a shape, bytes. No torch, no numpy."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

MAX_RANK = 8
MAX_TENSOR_BYTES = 4 << 30


class ElementType(enum.Enum):
    """The type of a tensor's elements; the values are torch's names."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"

    @property
    def bytes(self) -> int:
        return 4 if self is ElementType.FLOAT32 else 2


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A dense tensor: row-major, little-endian, without gaps."""

    element_type: ElementType
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.element_type.bytes

    def problem(self) -> str | None:
        """Return why it can't be accepted from a peer, or None."""
        if not 1 <= len(self.shape) <= MAX_RANK:
            return f"has {len(self.shape)} dimensions; 1 to {MAX_RANK} are allowed"
        if min(self.shape) < 1:
            return f"has the shape {list(self.shape)}; every size must be at least 1"
        if self.nbytes > MAX_TENSOR_BYTES:
            return f"has {self.nbytes} bytes; {MAX_TENSOR_BYTES} are allowed"
        return None


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor's bytes with their description; ``data`` has exactly ``spec.nbytes`` bytes."""

    spec: TensorSpec
    data: memoryview
