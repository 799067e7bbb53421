"""Spans and metrics of HTTP requests, by OpenTelemetry's conventions for HTTP servers."""

from __future__ import annotations

import time
from typing import Any

from opentelemetry.context import Context, attach
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context

from millstream_server.runtime.rpc.auth import CallerKind, caller
from millstream_server.runtime.rpc.call import Outcome, Visit
from millstream_server.runtime.rpc.http import HttpCall
from millstream_server.runtime.telemetry.metrics import HTTP_SERVER_DURATION
from millstream_server.runtime.telemetry.tracing import PROPAGATOR, Tracing

_CLIENT_GONE = 499
_SERVER_FAULT = 500
_VERBS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"})
_OTHER = "_OTHER"
"""The conventions' name for methods that HTTP doesn't have."""


class HttpTelemetryLayer:
    """Measures every request and, with tracing, makes a span of it; must be the outermost layer."""

    def __init__(self, tracing: Tracing | None = None) -> None:
        """Without ``tracing`` only measure durations."""
        self._tracer = tracing.tracer if tracing else None

    def covers(self, method: str) -> bool:
        return True

    def enter(self, call: Any) -> Visit:
        return _Request(self._tracer, call)


class _Request(Visit):
    """One request from its head to the end of its response."""

    __slots__ = ("_call", "_span", "_started")

    def __init__(self, tracer: Any, call: HttpCall) -> None:
        self._call: HttpCall | None = call
        self._started = time.perf_counter()
        self._span: Span | None = None
        if tracer is None:
            return
        here = PROPAGATOR.extract(dict(call.metadata), Context())
        verb = _verb(call)
        attributes = {"http.request.method": verb, "http.route": call.route or _OTHER}
        name = f"{verb} {call.route}" if call.route else verb
        self._span = tracer.start_span(name, here, SpanKind.SERVER, attributes)
        attach(set_span_in_context(self._span, here))  # each request has its own context

    def ended(self, outcome: Outcome) -> None:
        call, self._call = self._call, None  # they know each other
        if call is None:
            return
        status = call.status or _CLIENT_GONE
        took_s = time.perf_counter() - self._started
        labels = (_verb(call), call.route or _OTHER, str(status))
        HTTP_SERVER_DURATION.labels(*labels).observe(took_s)
        if self._span is not None:
            self._end_span(self._span, status, outcome)

    def _end_span(self, span: Span, status: int, outcome: Outcome) -> None:
        span.set_attribute("http.response.status_code", status)
        if (who := caller()).kind is not CallerKind.ANONYMOUS:
            span.set_attribute("enduser.id", who.name)
        if status >= _SERVER_FAULT or outcome.code.value:
            span.set_attribute("error.type", outcome.code.name)
        if status >= _SERVER_FAULT:
            span.set_status(Status(StatusCode.ERROR, outcome.message))
            if isinstance(outcome.cause, Exception):
                span.record_exception(outcome.cause)
        span.end()


def _verb(call: HttpCall) -> str:
    return call.verb if call.verb in _VERBS else _OTHER
