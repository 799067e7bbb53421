"""W3C trace context as plain data; `runtime.telemetry.tracing` makes it of spans."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

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


def incoming(metadata: Iterable[tuple[str, Any]] | None) -> TraceContext:
    """Read the trace context of an RPC from its metadata."""
    values = dict(metadata or ())
    if "traceparent" not in values and "baggage" not in values:
        return NOT_TRACED
    return TraceContext(
        values.get("traceparent", ""), values.get("tracestate", ""), values.get("baggage", "")
    )
