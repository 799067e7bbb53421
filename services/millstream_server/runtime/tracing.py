"""Tracing: W3C context in and out, spans to an OpenTelemetry collector. Off by default, then free.

The provider is ours and never OpenTelemetry's global one: SGLang installs its own as the global one
in a worker's process, with 64-bit trace ids and its own exporter.
"""

from __future__ import annotations

import asyncio
import logging
import re
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from opentelemetry import trace
from opentelemetry.baggage.propagation import W3CBaggagePropagator
from opentelemetry.context import Context, get_current
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.propagators.composite import CompositePropagator
from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from millstream_server.runtime.settings import SettingsError

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-")
_SHUTDOWN_LIMIT_S = 2.0
_SILENCE_S = 60.0
_EXPORT_LOGGERS = (
    "opentelemetry.exporter.otlp.proto.grpc.exporter",
    "opentelemetry.sdk._shared_internal",
)

_SPANS = TraceContextTextMapPropagator()
PROPAGATOR = CompositePropagator([_SPANS, W3CBaggagePropagator()])
"""traceparent, tracestate and baggage, whatever the process's global propagator is."""


@dataclass(frozen=True, slots=True)
class TraceContext:
    """W3C trace context of one request; empty when it isn't traced."""

    traceparent: str = ""
    tracestate: str = ""
    baggage: str = ""

    @property
    def trace_id(self) -> str:
        """The trace's id, 32 hex digits; empty without a traceparent."""
        found = _TRACEPARENT.match(self.traceparent)  # it came from a client: into no log unread
        return found[1] if found else ""


NOT_TRACED = TraceContext()


def incoming(metadata: Iterable[tuple[str, Any]] | None) -> TraceContext:
    """Read the trace context that an RPC came with."""
    values = dict(metadata or ())
    if "traceparent" not in values and "baggage" not in values:
        return NOT_TRACED
    return TraceContext(
        values.get("traceparent", ""), values.get("tracestate", ""), values.get("baggage", "")
    )


def trace_id(metadata: Iterable[tuple[str, Any]] | None = None) -> str:
    """Name the trace that the running code belongs to, for log lines; empty when there is none.

    It is the current span's or, with tracing off, that of the ``metadata`` the RPC came with.
    """
    context = trace.get_current_span().get_span_context()
    return f"{context.trace_id:032x}" if context.is_valid else incoming(metadata).trace_id


def ambient() -> TraceContext:
    """Read the running code's own trace context: what the RPC it serves came with, or its span."""
    carrier: dict[str, str] = {}
    PROPAGATOR.inject(carrier)
    return TraceContext(**carrier) if carrier else NOT_TRACED


class Tracing:
    """The process's tracer and where its spans go. All calls but `shutdown` come from anywhere."""

    def __init__(
        self, processor: SpanProcessor, *, sample_ratio: float, resource: Resource | None = None
    ) -> None:
        """Give ended spans to ``processor``; a caller's decision to sample wins over the ratio."""
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
        """Send spans to the collector at ``endpoint``; None without one.

        https:// means TLS. All else is as the SDK reads it from OTEL_* variables: batching,
        time-outs, headers, certificates; OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES win over
        what is passed here.

        Raises:
            SettingsError: the ratio is none.
        """
        if not 0 <= sample_ratio <= 1:
            raise SettingsError(f"--trace-sample-ratio: {sample_ratio:g} is not from 0 to 1")
        if not endpoint:
            return None
        for name in _EXPORT_LOGGERS:
            _quieten(logging.getLogger(name))
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
        """Find what a request's first span hangs on: the span that runs, or what it came with."""
        current = get_current()
        if trace.get_current_span(current).get_span_context().is_valid:
            return current
        return Tracing.extract(request)

    @staticmethod
    def extract(request: TraceContext) -> Context:
        """Read what a request came with, whatever span runs: on a stream of many it is nobody's."""
        return _SPANS.extract(
            {"traceparent": request.traceparent, "tracestate": request.tracestate}, Context()
        )

    @staticmethod
    def carry(span: trace.Span, baggage: str) -> TraceContext:
        """Write the context that makes what comes next a child of ``span``."""
        own = span.get_span_context()
        # What the propagator writes, in a tenth of its time.
        return TraceContext(
            f"00-{own.trace_id:032x}-{own.span_id:016x}-{own.trace_flags:02x}",
            own.trace_state.to_header() if own.trace_state else "",
            baggage,
        )

    async def shutdown(self) -> None:
        """Send what is left, for at most two seconds; a collector that is away is not waited for.

        Call it when everything that makes spans has ended. The thread is a daemon: it can't hold up
        the process's exit either.
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
                self._exporter.shutdown()  # ends the attempt that is under way


class _OncePerMinute(logging.Filter):
    """Lets one record a minute through: a collector that is away is news once, not per batch."""

    _next = 0.0

    def filter(self, record: logging.LogRecord) -> bool:
        """Drop what comes too soon after the last; what is below a warning isn't counted."""
        if record.levelno < logging.WARNING:
            return True
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + _SILENCE_S
        return True


def _quieten(logger: logging.Logger) -> None:
    if not any(isinstance(f, _OncePerMinute) for f in logger.filters):
        logger.addFilter(_OncePerMinute())
