"""What comes back for requests for vectors and scores."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Vectors:
    """Some vectors of a batch."""

    indices: Sequence[int]
    """Which inputs."""
    dimensions: int
    values: bytes
    """float32, little endian, [len(indices), dimensions]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedFinished:
    """A batch's good end."""

    request_id: str
    model: str
    input_tokens: int


@dataclass(frozen=True, slots=True)
class Ranked:
    """One document's score."""

    index: int
    logit: float
    document: str = ""

    @property
    def score(self) -> float:
        """The logistic function of `logit`: 0 to 1."""
        # Both forms are the same; each overflows on one side.
        if self.logit >= 0:
            return 1 / (1 + math.exp(-self.logit))
        power = math.exp(self.logit)
        return power / (1 + power)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """All documents' scores, best first; equal ones by index."""

    results: Sequence[Ranked]
    input_tokens: int
    request_id: str = ""
    model: str = ""
