"""What a worker tells of a request: its span, which the engine's spans hang on, and its metrics."""

from __future__ import annotations

from types import TracebackType

from opentelemetry.trace import SpanKind

from millstream_server.engines.base import Finish, Role
from millstream_server.runtime.tracing import TraceContext, Tracing
from millstream_server.worker_stream.request_span import (
    UNTRACED,
    RequestSpan,
    TracedRequest,
    reason_of,
)
from millstream_server.worker_stream.start import MAX_REQUEST_ID_BYTES, GenerationStart
from millstream_server.worker_stream.stream_metrics import StreamMetrics, stream_metrics

_OPERATIONS = {Role.PREFILL: "prefill", Role.DECODE: "decode", Role.AGGREGATED: "decode"}


class WorkerTelemetry:
    """Makes the telemetry of a worker's requests; one per process."""

    def __init__(self, role: Role, model: str = "", tracing: Tracing | None = None) -> None:
        """Record metrics and, with ``tracing``, spans."""
        self._metrics = stream_metrics(role)
        self._tracing = tracing
        self._name = f"{_OPERATIONS[role]} {model}".rstrip()
        self._attributes = {
            "gen_ai.operation.name": _OPERATIONS[role],
            "gen_ai.request.model": model,
            "millstream.role": role.value,
        }

    def open(self, start: GenerationStart) -> RequestTelemetry:
        """Begin a request; leaving ``with`` it by an exception ends it again."""
        return RequestTelemetry(self._metrics, self._span(start))

    def _span(self, start: GenerationStart) -> RequestSpan:
        if self._tracing is None:
            return UNTRACED
        request_id = start.request_id[:MAX_REQUEST_ID_BYTES]
        return TracedRequest(
            self._tracing.tracer.start_span(
                self._name,
                self._tracing.extract(start.trace),
                SpanKind.SERVER,
                {**self._attributes, "millstream.request_id": request_id},
            ),
            tells_usage=True,
        )


class RequestTelemetry:
    """One request, from its start message to its terminal report."""

    __slots__ = ("_metrics", "_span")

    def __init__(self, metrics: StreamMetrics, span: RequestSpan) -> None:
        """Count it in."""
        self._metrics = metrics
        self._span = span
        metrics.begun()

    def __enter__(self) -> None:
        """Start the request."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End a request that was refused."""
        if error is not None:
            self.failed(error)

    def headers(self, request: TraceContext) -> dict[str, str]:
        """Write the headers that make the engine's spans children of this one."""
        carried = self._span.carry(request)
        headers = {"traceparent": carried.traceparent, "tracestate": carried.tracestate}
        return {name: value for name, value in headers.items() if value}

    def finished(self, finish: Finish) -> None:
        """Note the good end."""
        self._metrics.ended(finish.reason.name)
        self._span.finished(finish)

    def failed(self, error: BaseException) -> None:
        """Note the failure."""
        self._metrics.ended(reason_of(error))
        self._span.failed(error)
