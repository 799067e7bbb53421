"""Spans and metrics of requests that are forwarded whole."""

from __future__ import annotations

import time
from types import TracebackType

from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, set_span_in_context

from millstream_server.generation.span import NO_SPAN, RequestSpan, TracedRequest, server_of
from millstream_server.runtime.telemetry import metrics
from millstream_server.runtime.telemetry.request_spans import fail, reason_of
from millstream_server.runtime.telemetry.trace_context import TraceContext
from millstream_server.runtime.telemetry.tracing import Tracing

_NOWHERE = Context()


class ForwardedTelemetry:
    """Telemetry of one request: ``with`` it from arrival to end."""

    def __init__(self, tracing: Tracing | None, operation: str, trace: TraceContext) -> None:
        """``operation`` is its `gen_ai.operation.name`, ``trace`` its caller's."""
        self._tracing = tracing
        self._operation = operation
        self._trace = trace
        self._labels = (operation, "", "", "")
        self._span: Span | None = None
        self.trace_id = trace.trace_id
        self.outcome = ""
        """How it ended: OK or the failure's reason."""

    def __enter__(self) -> None:
        """Begin; the time of the request starts here."""
        self._began = time.perf_counter()
        self._began_ns = time.time_ns()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End, well or with ``error``."""
        reason = reason_of(error)
        self.outcome = reason or "OK"
        seconds = time.perf_counter() - self._began
        metrics.REQUEST_DURATION.labels(*self._labels, reason).observe(seconds)
        span = self._span or self._start("", "", "")
        if span is not None:
            if error is not None:
                fail(span, reason, error)
            span.end()

    def known(self, model: str, provider: str, request_id: str) -> None:
        """Record the request's model, one we serve, and its engine's vendor."""
        self._labels = (self._operation, provider, model, model)
        self._span = self._start(model, provider, request_id)

    def used(self, input_tokens: int) -> None:
        """Record the tokens that the model has read."""
        metrics.TOKENS.labels(self._labels[2], "input").inc(input_tokens)
        if self._span is not None:
            self._span.set_attribute("gen_ai.usage.input_tokens", input_tokens)

    def leg(self, name: str, address: str) -> RequestSpan:
        """Start the span of the request at a worker."""
        if self._tracing is None or self._span is None:
            return NO_SPAN
        context = set_span_in_context(self._span, _NOWHERE)
        tracer = self._tracing.tracer
        return TracedRequest(tracer.start_span(name, context, SpanKind.CLIENT, server_of(address)))

    def _start(self, model: str, provider: str, request_id: str) -> Span | None:
        if self._tracing is None:
            return None
        span = self._tracing.tracer.start_span(
            f"{self._operation} {model}".rstrip(),
            self._tracing.extract(self._trace),
            SpanKind.INTERNAL,
            {
                "gen_ai.operation.name": self._operation,
                "gen_ai.provider.name": provider,
                "gen_ai.request.model": model,
                "gen_ai.response.model": model,
                "gen_ai.response.id": request_id,
            },
            start_time=self._began_ns,
        )
        self.trace_id = f"{span.get_span_context().trace_id:032x}"
        return span
