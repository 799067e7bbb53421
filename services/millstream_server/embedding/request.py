"""Requests for vectors and scores, and what comes back for them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from millstream_server.runtime.priority import Priority
from millstream_server.runtime.telemetry.trace_context import NOT_TRACED, TraceContext

MAX_INPUTS = 2048
MAX_DOCUMENTS = 1024
MAX_INSTRUCTION_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedRequest:
    """A batch of inputs, as token ids or, at the Processor, texts."""

    inputs: Sequence[str | Sequence[int]]
    dimensions: int | None = None
    """None: the model's width."""
    normalize: bool = True
    prompt_name: str | None = None
    """None: the model's default."""
    model: str = ""
    request_id: str = ""
    priority: Priority = Priority.NORMAL
    trace: TraceContext = NOT_TRACED
    deadline_s: float | None = None
    """On the clock of `time.monotonic`; None: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RerankRequest:
    """A query and documents, or their pairs as token ids."""

    query: str = ""
    documents: Sequence[str] = ()
    pairs: Sequence[Sequence[int]] = ()
    top_n: int | None = None
    instruction: str | None = None
    """None: the model's own."""
    return_documents: bool = False
    model: str = ""
    request_id: str = ""
    priority: Priority = Priority.NORMAL
    trace: TraceContext = NOT_TRACED
    deadline_s: float | None = None


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
