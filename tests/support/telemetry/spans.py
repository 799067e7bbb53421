"""Spans as a test reads them, kept in memory."""

from __future__ import annotations

from collections.abc import Mapping

import grpc
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry

from millstream_server.runtime.telemetry.metrics import REGISTRY
from millstream_server.runtime.telemetry.tracing import Tracing
from millstream_testing.waiting import until

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
SPAN_ID = "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE_ID}-{SPAN_ID}-01"
INCOMING = (("traceparent", TRACEPARENT), ("tracestate", "vendor=1"), ("baggage", "tenant=blue"))
"""Metadata of a client that traces."""


class SpanLog:
    """A tracing that keeps its spans."""

    def __init__(self, sample_ratio: float = 1.0) -> None:
        self._exporter = InMemorySpanExporter()
        self.tracing = Tracing(SimpleSpanProcessor(self._exporter), sample_ratio=sample_ratio)

    @property
    def ended(self) -> list[ReadableSpan]:
        """All spans that ended, the first to end first; each once."""
        spans = list(self._exporter.get_finished_spans())
        assert len({id_of(span) for span in spans}) == len(spans)
        return spans

    async def until_ended(self, count: int) -> list[ReadableSpan]:
        """Wait for so many spans, and no more."""
        await until(lambda: len(self.ended) >= count, 3)
        assert len(self.ended) == count, [span.name for span in self.ended]
        return self.ended

    async def only(self) -> ReadableSpan:
        """Wait for one span, and no more."""
        (span,) = await self.until_ended(1)
        return span

    def forget(self) -> None:
        """Start afresh."""
        self._exporter.clear()

    def named(self, name: str) -> ReadableSpan:
        """Find the one span of this name."""
        (span,) = (span for span in self.ended if span.name == name)
        return span


def id_of(span: ReadableSpan) -> int:
    assert span.context is not None
    return int(span.context.span_id)


def trace_of(span: ReadableSpan) -> str:
    assert span.context is not None
    return f"{span.context.trace_id:032x}"


def parent_of(span: ReadableSpan) -> int | None:
    return span.parent.span_id if span.parent else None


def attributes(span: ReadableSpan) -> Mapping[str, object]:
    return span.attributes or {}


def code_of(span: ReadableSpan) -> str:
    """Read the status code that a span says, in the new conventions or the old."""
    said = attributes(span)
    if "rpc.response.status_code" in said:
        return str(said["rpc.response.status_code"])
    number = said["rpc.grpc.status_code"]
    return next(code.name for code in grpc.StatusCode if code.value[0] == number)


def exceptions(span: ReadableSpan) -> list[Event]:
    return [event for event in span.events if event.name == "exception"]


class Samples:
    """What metrics changed by since this was made."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self._registry = registry
        self._before = self._read()

    def _read(self) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
        return {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for metric in self._registry.collect()
            for sample in metric.samples
        }

    def grown(self, name: str, **labels: str) -> float:
        """Sum what the samples of this name with these labels grew by."""
        return sum(
            value - self._before.get((found, its), 0.0)
            for (found, its), value in self._read().items()
            if found == name and labels.items() <= dict(its).items()
        )
