"""What the Processor asks of a worker, in plain types."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from millstream_server.engines.base import LogprobOptions, Sampling
from millstream_server.runtime.tracing import NOT_TRACED, TraceContext
from millstream_server.transfer.ticket import Ticket

__all__ = ["LONG_STREAMS", "MAX_REQUEST_ID_BYTES", "NOT_TRACED", "GenerationStart", "TraceContext"]

MAX_REQUEST_ID_BYTES = 128
LONG_STREAMS = frozenset(
    {
        "millstream.v1.PrefillService/Prefill",
        "millstream.v1.DecodeService/Decode",
        "millstream.v1.WorkerService/WatchLoad",
    }
)
"""Methods whose streams last as long as a connection: their requests are spans, they aren't."""


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
