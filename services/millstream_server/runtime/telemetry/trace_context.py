"""W3C trace context as plain data; `runtime.telemetry.tracing` reads and writes it."""

from __future__ import annotations

import re
from dataclasses import dataclass

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-")


@dataclass(frozen=True, slots=True)
class TraceContext:
    """W3C trace context of one request; empty if the request isn't traced."""

    traceparent: str = ""
    tracestate: str = ""
    baggage: str = ""

    @property
    def trace_id(self) -> str:
        """The trace's id, 32 hex digits; empty without a well-formed traceparent."""
        found = _TRACEPARENT.match(self.traceparent) if self.traceparent else None
        return found[1] if found else ""


NOT_TRACED = TraceContext()
