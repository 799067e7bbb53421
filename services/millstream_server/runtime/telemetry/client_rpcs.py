"""Spans and metrics of the RPCs that this process sends; for those it serves: `server_rpcs`.

The interceptors of opentelemetry-instrumentation-grpc are not used: a cancelled call is no span or
one without an end, and for each message of a stream they add a queue and a task.
"""

from __future__ import annotations

import time
from collections.abc import Coroutine, Sequence
from functools import cache
from typing import Any, TypeVar

import grpc
from opentelemetry.context import get_current
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context

from millstream_server.runtime.telemetry.counts import Method
from millstream_server.runtime.telemetry.metrics import RPC_CLIENT_DURATION
from millstream_server.runtime.telemetry.tracing import PROPAGATOR, Tracing, server_of

T = TypeVar("T")
Metadata = Sequence[tuple[str, str]]


class ClientSpans:
    """Makes the spans of one channel's calls; none without tracing."""

    def __init__(self, tracing: Tracing | None, target: str) -> None:
        """Make spans of ``tracing``; ``target`` is "host:port"."""
        self._tracer = tracing.tracer if tracing else None
        self._server = server_of(target)

    def start(self, method: str, metadata: Metadata) -> tuple[Span | None, Metadata]:
        """Start the span of a call; return it, and the call's metadata with it as the parent."""
        if self._tracer is None:
            return None, metadata
        attributes = {**_method(method).attributes, **self._server}
        span = self._tracer.start_span(method, None, SpanKind.CLIENT, attributes)
        carrier = dict(metadata)
        PROPAGATOR.inject(carrier, set_span_in_context(span, get_current()))
        return span, tuple(carrier.items())


def observe_call(call: Any, method: str, span: Span | None = None) -> None:
    """Measure a call of grpc.aio, and end its span; ``method`` is "package.Service/Method"."""
    call.add_done_callback(_SentRpc(_method(method), span).done)


@cache
def _method(name: str) -> Method:
    return Method(name, RPC_CLIENT_DURATION)


class _SentRpc:
    """One RPC from its start to its status."""

    __slots__ = ("_method", "_span", "_started")

    def __init__(self, method: Method, span: Span | None) -> None:
        self._method = method
        self._span = span
        self._started = time.perf_counter()

    def done(self, call: Any) -> None:
        code = _at_once(call.code(), grpc.StatusCode.UNKNOWN)
        self._method.observe(code, time.perf_counter() - self._started)
        span = self._span
        if span is None:
            return
        span.set_attribute("rpc.response.status_code", code.name)
        if code is not grpc.StatusCode.OK:
            span.set_attribute("error.type", code.name)
            span.set_status(Status(StatusCode.ERROR, _at_once(call.details(), "") or ""))
        span.end()


def _at_once(ready: Coroutine[Any, Any, T], otherwise: T) -> T:
    """Run a coroutine that doesn't wait, such as the status of a call that is over."""
    try:
        ready.send(None)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    ready.close()
    return otherwise
