"""`python -m tests.benchmarks.otlp_sink`: an OTLP collector that counts spans and forgets them.

A process of its own, so that what it costs isn't charged to those that are measured. On SIGTERM it
writes `spans=<count>` to its log.
"""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc


class _Counter(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self) -> None:
        self.spans = 0
        self._lock = threading.Lock()

    def Export(self, request: Any, context: Any) -> Any:
        count = sum(
            len(scope.spans)
            for resource in request.resource_spans
            for scope in resource.scope_spans
        )
        with self._lock:
            self.spans += count
        return trace_service_pb2.ExportTraceServiceResponse()


def main() -> None:
    """Collect until SIGTERM."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.otlp_sink", description=__doc__
    )
    parser.add_argument("--listen", required=True, help="address to serve on, HOST:PORT")
    arguments = parser.parse_args()
    counter = _Counter()
    server = grpc.server(ThreadPoolExecutor(2), options=[("grpc.so_reuseport", 0)])
    add: Any = trace_service_pb2_grpc.add_TraceServiceServicer_to_server  # untyped
    add(counter, server)
    health_pb2_grpc.add_HealthServicer_to_server(health.HealthServicer(), server)
    server.add_insecure_port(arguments.listen)
    server.start()
    signal.sigwait({signal.SIGTERM, signal.SIGINT})
    server.stop(1).wait()
    sys.stderr.write(f"spans={counter.spans}\n")


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    main()
