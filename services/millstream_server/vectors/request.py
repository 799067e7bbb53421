"""Requests for vectors and scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from millstream_server.runtime.priority import Priority
from millstream_server.runtime.telemetry.trace_context import NOT_TRACED, TraceContext

MAX_INPUTS = 2048
MAX_DOCUMENTS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedRequest:
    """A batch of inputs, as token ids or, at the Processor, texts."""

    inputs: Sequence[str | Sequence[int]]
    dimensions: int | None = None
    """None: the model's width."""
    normalize: bool = True
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
    return_documents: bool = False
    model: str = ""
    request_id: str = ""
    priority: Priority = Priority.NORMAL
    trace: TraceContext = NOT_TRACED
    deadline_s: float | None = None
