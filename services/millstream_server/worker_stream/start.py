"""What the Processor asks of a worker, in plain types."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from millstream_server.engines.base import LogprobOptions, Sampling
from millstream_server.transfer.ticket import Ticket

MAX_REQUEST_ID_BYTES = 128


@dataclass(frozen=True, slots=True)
class TraceContext:
    """W3C trace context of one request; empty when it isn't traced."""

    traceparent: str = ""
    tracestate: str = ""
    baggage: str = ""


NOT_TRACED = TraceContext()


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationStart:
    """One request for a worker. ``timeout_s`` is the time left until the caller's deadline."""

    request_id: str
    token_ids: Sequence[int]
    sampling: Sampling
    logprobs: LogprobOptions | None = None
    ticket: Ticket | None = None
    trace: TraceContext = NOT_TRACED
    timeout_s: float | None = None
