"""The span of one request on one worker, and the metrics of worker streams, for both ends."""

from __future__ import annotations

from typing import Any

from opentelemetry.trace import Span

from millstream_server.generation.output import Finish
from millstream_server.runtime.telemetry.trace_context import TraceContext
from millstream_server.runtime.telemetry.tracing import Tracing, fail, reason_of


class RequestSpan:
    """Without tracing: records nothing and passes the trace context on.

    Of `finished`, `succeeded` and `failed` only the first call counts.
    """

    __slots__ = ()

    def carry(self, request: TraceContext) -> TraceContext:
        """Return the trace context for the next hop; ``request`` is the incoming one."""
        return request

    def finished(self, finish: Finish) -> None:
        """Record that the request finished."""

    def succeeded(self) -> None:
        """Record that a request without tokens succeeded, instead of `finished`."""

    def failed(self, error: BaseException) -> None:
        """Record the request's failure."""


NO_SPAN = RequestSpan()


class TracedRequest(RequestSpan):
    """With tracing: records a span."""

    __slots__ = ("_span",)

    def __init__(self, span: Span) -> None:
        """Own ``span``, which has started."""
        self._span: Span | None = span

    def carry(self, request: TraceContext) -> TraceContext:
        """See `RequestSpan.carry`; the next hop becomes a child of this span."""
        return Tracing.carry(self._span, request.baggage) if self._span else request

    def finished(self, finish: Finish) -> None:
        """See `RequestSpan.finished`."""
        self.succeeded()

    def succeeded(self) -> None:
        """See `RequestSpan.succeeded`."""
        span, self._span = self._span, None
        if span is not None:
            span.end()

    def failed(self, error: BaseException) -> None:
        """End the span with the failure's reason."""
        span, self._span = self._span, None
        if span is not None:
            fail(span, reason_of(error), error)
            span.end()


def usage_attributes(finish: Finish) -> dict[str, Any]:
    """Return the token counts as span attributes."""
    return {
        "gen_ai.usage.input_tokens": finish.prompt_tokens,
        "gen_ai.usage.output_tokens": finish.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": finish.cached_tokens,
        "gen_ai.response.finish_reasons": (finish.reason.value,),
    }
