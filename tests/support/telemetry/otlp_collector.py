"""An OpenTelemetry collector in the test's own process: takes spans over gRPC and keeps them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc


@dataclass(frozen=True)
class Received:
    """A span as it arrived."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    kind: int
    attributes: dict[str, Any]
    resource: dict[str, Any]
    failed: bool


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Serves TraceService in threads of its own, so that a blocked test doesn't block it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spans: list[Received] = []
        self.address = ""

    def Export(self, request: Any, context: Any) -> Any:
        with self._lock:
            self._spans += _received(request)
        return trace_service_pb2.ExportTraceServiceResponse()

    @property
    def spans(self) -> list[Received]:
        """What has arrived so far."""
        with self._lock:
            return list(self._spans)


@contextlib.contextmanager
def collecting() -> Iterator[Collector]:
    """Run a collector; its ``address`` is "host:port"."""
    collector = Collector()
    with ThreadPoolExecutor(4) as threads:
        server = grpc.server(threads)
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)  # type: ignore[no-untyped-call]
        collector.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        server.start()
        try:
            yield collector
        finally:
            server.stop(0).wait()


def _received(request: Any) -> list[Received]:
    return [
        Received(
            service=str(_plain(batch.resource.attributes).get("service.name", "")),
            name=span.name,
            trace_id=span.trace_id.hex(),
            span_id=span.span_id.hex(),
            parent_id=span.parent_span_id.hex(),
            kind=span.kind,
            attributes=_plain(span.attributes),
            resource=_plain(batch.resource.attributes),
            failed=span.status.code == span.status.STATUS_CODE_ERROR,
        )
        for batch in request.resource_spans
        for scope in batch.scope_spans
        for span in scope.spans
    ]


def _plain(attributes: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    return getattr(value, kind) if kind else None
