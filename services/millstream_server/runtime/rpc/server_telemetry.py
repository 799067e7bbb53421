"""Spans and metrics of the RPCs that a server serves.

The mapping of opentelemetry-instrumentation-grpc decides which status a span gets. Its server
interceptor is not used: it fails with streams that are cancelled or ended early and with handlers
that read and write, and records exceptions twice.
tests/contract/test_rpc_telemetry.py shows each failure.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection
from typing import Any

from opentelemetry.context import Context, attach
from opentelemetry.instrumentation.grpc._utilities import _server_status
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context

from millstream_server.runtime.errors import Code
from millstream_server.runtime.rpc.auth import CallerKind, caller
from millstream_server.runtime.rpc.call import Call, Outcome, Visit
from millstream_server.runtime.rpc.status import GRPC_CODES
from millstream_server.runtime.telemetry.counts import Method
from millstream_server.runtime.telemetry.metrics import RPC_SERVER_DURATION, RPC_SERVER_OPEN
from millstream_server.runtime.telemetry.tracing import PROPAGATOR, Tracing

_CALLED_AUTOMATICALLY = ("/grpc.", "/xds.", "/envoy.")
"""Health, reflection, channelz, load reports and discovery: not observed."""
_OTHER = "/_OTHER"
"""The conventions' name for methods that the server does not have."""


_OPEN: Counter[str] = Counter()
"""Open RPCs of the process, by method."""


class TelemetryLayer:
    """Measures every RPC and, with tracing, makes a span of it; must be the outermost layer.

    Health, reflection and the like are not observed.
    """

    def __init__(
        self,
        tracing: Tracing | None = None,
        *,
        served: Collection[str],
        without_spans: Collection[str] = (),
    ) -> None:
        """Without ``tracing`` only measure durations.

        Methods that aren't in ``served`` ("/millstream.v1.DecodeService/Decode") share one name,
        since callers can invent any number of them.

        ``without_spans`` are methods ("millstream.v1.DecodeService/Decode") whose streams carry
        many requests for hours: no span; their trace context becomes their requests' parent.
        """
        self._tracer = tracing.tracer if tracing else None
        self._methods = {
            name: _ServedMethod(name, self._tracer, without_spans) for name in (*served, _OTHER)
        }

    def covers(self, method: str) -> bool:
        return not method.startswith(_CALLED_AUTOMATICALLY)

    def enter(self, call: Call) -> Visit:
        return _ServedRpc(self._methods.get(call.method) or self._methods[_OTHER], call)


class _ServedMethod(Method):
    def __init__(self, full_name: str, tracer: Any, without_spans: Collection[str]) -> None:
        super().__init__(full_name, RPC_SERVER_DURATION)
        self.tracer = tracer
        self.spans = tracer is not None and self.name not in without_spans
        # Read at each scrape, which is cheaper than to set the gauge at every RPC.
        RPC_SERVER_OPEN.labels(self.name).set_function(lambda: _OPEN[self.name])


class _ServedRpc(Visit):
    """One RPC from its start to its status."""

    __slots__ = ("_method", "_span", "_started")

    def __init__(self, method: _ServedMethod, call: Call) -> None:
        self._method = method
        self._started = time.perf_counter()
        self._span: Span | None = None
        _OPEN[method.name] += 1
        if method.tracer is not None:
            self._trace(method, call)

    def _trace(self, method: _ServedMethod, call: Call) -> None:
        here = PROPAGATOR.extract(dict(call.metadata), Context())
        if method.spans:
            self._span = method.tracer.start_span(
                method.name, here, SpanKind.SERVER, {**method.attributes, **_peer(call.peer)}
            )
            here = set_span_in_context(self._span, here)
        attach(here)  # never detached: each RPC is a task with its own context

    def ended(self, outcome: Outcome) -> None:
        method = self._method
        _OPEN[method.name] -= 1
        method.observe(outcome.code, time.perf_counter() - self._started)
        if self._span is not None:
            _end_span(self._span, outcome)


def _end_span(span: Span, outcome: Outcome) -> None:
    code = outcome.code
    span.set_attribute("rpc.response.status_code", code.name)
    if (who := caller()).kind is not CallerKind.ANONYMOUS:
        span.set_attribute("enduser.id", who.name)
    status = _server_status(GRPC_CODES[code], outcome.message)  # type: ignore[no-untyped-call]
    if code is Code.CANCELLED:
        status = Status(StatusCode.ERROR, outcome.message)
    if status.status_code is StatusCode.ERROR:
        span.set_attribute("error.type", code.name)
        span.set_status(status)
        if isinstance(outcome.cause, Exception):
            span.record_exception(outcome.cause)
    span.end()


def _peer(peer: str) -> dict[str, str | int]:
    """Parse "ipv4:127.0.0.1:4711" or "ipv6:%5B::1%5D:4711"; empty for other forms."""
    kind, _, rest = peer.partition(":")
    host, _, port = rest.rpartition(":")
    if kind not in ("ipv4", "ipv6") or not port.isdigit():
        return {}
    host = host.replace("%5B", "").replace("%5D", "").strip("[]")
    return {"client.address": host, "client.port": int(port)}
