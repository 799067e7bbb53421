"""Tracing: W3C trace context, and spans to an OpenTelemetry collector. Off by default.

The provider is our own, not OpenTelemetry's global one: in a worker's process SGLang sets the
global one to its own, with 64-bit trace ids and its own exporter.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from typing import Any

from opentelemetry import trace
from opentelemetry.baggage.propagation import W3CBaggagePropagator
from opentelemetry.context import Context, get_current
from opentelemetry.propagators.composite import CompositePropagator
from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Span, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from millstream_server.runtime.errors import ServingError
from millstream_server.runtime.settings import SettingsError
from millstream_server.runtime.telemetry.trace_context import NOT_TRACED, TraceContext, incoming

_SHUTDOWN_LIMIT_S = 2.0
_SILENCE_S = 60.0


class _OncePerMinute(logging.Filter):
    """Passes one record per minute: an unreachable collector is logged once per batch otherwise."""

    _next = 0.0

    def filter(self, record: logging.LogRecord) -> bool:
        """Drop warnings and errors within a minute of the last; lower levels always pass."""
        if record.levelno < logging.WARNING:
            return True
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + _SILENCE_S
        return True


_QUIET = {
    "opentelemetry.exporter.otlp.proto.grpc.exporter": _OncePerMinute(),
    "opentelemetry.sdk._shared_internal": _OncePerMinute(),
}
"""Filters of the exporter's loggers."""
_SPANS = TraceContextTextMapPropagator()
PROPAGATOR = CompositePropagator([_SPANS, W3CBaggagePropagator()])
"""traceparent, tracestate and baggage, independent of the process's global propagator."""


def trace_id(metadata: Iterable[tuple[str, Any]] | None = None) -> str:
    """Return the id of the current trace, for log lines; empty when there is none.

    It is the current span's or, without tracing, that in the RPC's ``metadata``.
    """
    context = trace.get_current_span().get_span_context()
    return f"{context.trace_id:032x}" if context.is_valid else incoming(metadata).trace_id


def ambient() -> TraceContext:
    """Return the current trace context: the current span's, or that of the RPC being served."""
    carrier: dict[str, str] = {}
    PROPAGATOR.inject(carrier)
    return TraceContext(**carrier) if carrier else NOT_TRACED


class Tracing:
    """The process's tracer and its span exporter. Thread-safe, except `shutdown`."""

    def __init__(
        self, processor: SpanProcessor, *, sample_ratio: float, resource: Resource | None = None
    ) -> None:
        """Pass ended spans to ``processor``; a caller's sampling decision overrides the ratio."""
        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(sample_ratio)),
            resource=resource,
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(processor)
        self.tracer = self._provider.get_tracer("millstream", version("millstream"))
        self._exporter: SpanExporter | None = None

    @classmethod
    def from_settings(
        cls,
        endpoint: str,
        sample_ratio: float,
        *,
        service_name: str,
        attributes: Mapping[str, str] | None = None,
    ) -> Tracing | None:
        """Make a tracing that sends spans to the collector at ``endpoint``; None if it is empty.

        https:// means TLS. The SDK reads the rest from OTEL_* variables: batching, time-outs,
        headers, certificates. OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES override the
        arguments.

        Raises:
            SettingsError: the ratio is not from 0 to 1.
        """
        if not 0 <= sample_ratio <= 1:
            raise SettingsError(f"--trace-sample-ratio: {sample_ratio:g} is not from 0 to 1")
        if not endpoint:
            return None
        # Here, since it takes 3 MB: most processes have no collector.
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import (  # noqa: PLC0415
            OTLPSpanExporter,
        )

        for name, once in _QUIET.items():
            logging.getLogger(name).addFilter(once)
        own = Resource({SERVICE_NAME: service_name, **(attributes or {})})
        exporter = OTLPSpanExporter(endpoint=endpoint, insecure=not endpoint.startswith("https://"))
        tracing = cls(
            BatchSpanProcessor(exporter),
            sample_ratio=sample_ratio,
            resource=Resource.create().merge(own).merge(OTELResourceDetector().detect()),
        )
        tracing._exporter = exporter
        return tracing

    @staticmethod
    def parent(request: TraceContext) -> Context:
        """Return the parent of a request's first span: the current span or the request's own."""
        current = get_current()
        if trace.get_current_span(current).get_span_context().is_valid:
            return current
        return Tracing.extract(request)

    @staticmethod
    def extract(request: TraceContext) -> Context:
        """Return a request's own context; the current span is ignored, since it is the stream's."""
        return _SPANS.extract(
            {"traceparent": request.traceparent, "tracestate": request.tracestate}, Context()
        )

    @staticmethod
    def carry(span: trace.Span, baggage: str) -> TraceContext:
        """Return the context for the next hop: its spans become children of ``span``."""
        own = span.get_span_context()
        # The same as the propagator's, in a tenth of its time.
        return TraceContext(
            f"00-{own.trace_id:032x}-{own.span_id:016x}-{own.trace_flags:02x}",
            own.trace_state.to_header() if own.trace_state else "",
            baggage,
        )

    async def shutdown(self) -> None:
        """Send the remaining spans, within two seconds at most.

        Call it when all code that makes spans has ended. It runs in a daemon thread, which can't
        delay the process's exit.
        """
        loop = asyncio.get_running_loop()
        flushed = asyncio.Event()

        def flush() -> None:
            self._provider.shutdown()
            if not loop.is_closed():
                loop.call_soon_threadsafe(flushed.set)

        threading.Thread(target=flush, name="trace-flush", daemon=True).start()
        try:
            async with asyncio.timeout(_SHUTDOWN_LIMIT_S):
                await flushed.wait()
        except TimeoutError:
            if self._exporter is not None:
                self._exporter.shutdown()  # ends the current attempt


def server_of(target: str) -> dict[str, str | int]:
    """Return the attributes of a span that name the server at "host:port"."""
    host, _, port = target.rpartition(":")
    if not port.isdigit():
        return {"server.address": target}
    return {"server.address": host.strip("[]"), "server.port": int(port)}


def reason_of(error: BaseException | None) -> str:
    """Return the contract's name of a failure; INTERNAL for other exceptions."""
    if error is None:
        return ""
    if isinstance(error, ServingError):
        return error.reason
    return "INTERNAL" if isinstance(error, Exception) else "CANCELLED"


def fail(span: Span, reason: str, error: BaseException | None) -> None:
    """Mark a span as failed; only messages meant for callers are recorded."""
    message = error.message if isinstance(error, ServingError) else ""
    span.set_attribute("error.type", reason)
    span.set_status(Status(StatusCode.ERROR, message or reason))
