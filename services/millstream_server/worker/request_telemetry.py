"""Telemetry of a worker's requests, of any ability: spans and counts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from opentelemetry.trace import Span, SpanKind

from millstream_server.engines.base import Role
from millstream_server.runtime.telemetry.request_counts import RequestCounts
from millstream_server.runtime.telemetry.request_spans import fail, reason_of
from millstream_server.runtime.telemetry.trace_context import TraceContext
from millstream_server.runtime.telemetry.tracing import Tracing

MAX_REQUEST_ID = 128
"""Most characters of a client's request id in a span."""


class RequestTelemetry:
    """Telemetry of all requests of a worker. Without tracing it only counts, and spans are None."""

    def __init__(self, operation: str, role: Role, model: str, tracing: Tracing | None) -> None:
        """Name spans after the ``operation`` (`gen_ai.operation.name`) and the ``model``."""
        self._counts = RequestCounts(role.value)
        self._tracing = tracing
        self._name = f"{operation} {model}".rstrip()
        self._attributes = {
            "gen_ai.operation.name": operation,
            "gen_ai.request.model": model,
            "millstream.role": role.value,
        }

    def begun(self, request_id: str, trace: TraceContext) -> Span | None:
        """Count a request as open and start its span, a child of ``trace``."""
        self._counts.begun()
        if self._tracing is None:
            return None
        attributes = {**self._attributes, "millstream.request_id": request_id[:MAX_REQUEST_ID]}
        return self._tracing.tracer.start_span(
            self._name, self._tracing.extract(trace), SpanKind.SERVER, attributes
        )

    def finished(self, span: Span | None, outcome: str, attributes: Mapping[str, Any]) -> None:
        """Count a request that succeeded and end its span."""
        self._counts.ended(outcome)
        if span is not None:
            span.set_attributes(dict(attributes))
            span.end()

    def failed(self, span: Span | None, error: BaseException) -> None:
        """Count a request that failed and end its span."""
        reason = reason_of(error)
        self._counts.ended(reason)
        if span is not None:
            fail(span, reason, error)
            span.end()
