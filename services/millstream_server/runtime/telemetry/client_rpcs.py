"""Spans and metrics of the RPCs that this process sends; for those it serves: `server_rpcs`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine
from typing import Any, TypeVar

import grpc
from opentelemetry.context import Context, get_current
from opentelemetry.instrumentation.grpc._aio_client import (
    StreamStreamAioClientInterceptor,
    StreamUnaryAioClientInterceptor,
    UnaryStreamAioClientInterceptor,
    UnaryUnaryAioClientInterceptor,
)
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context

from millstream_server.runtime.telemetry.counts import Method
from millstream_server.runtime.telemetry.metrics import RPC_CLIENT_DURATION
from millstream_server.runtime.telemetry.tracing import PROPAGATOR, Tracing

T = TypeVar("T")
Details = Any
ClientCall = Any


class _Client:
    """Common base of the four kinds of client interceptor.

    They return gRPC's own call object, with a callback for its end: it keeps its API, and the span
    ends also when the stream is not read to its end.
    """

    def __init__(self, tracing: Tracing | None, target: str, without_spans: frozenset[str]) -> None:
        super().__init__(tracing.tracer if tracing else None)  # type: ignore[call-arg]
        self._server = _server(target)
        self._without_spans = without_spans
        self._methods: dict[str, Method] = {}

    async def _observe(
        self, continuation: Callable[..., Awaitable[ClientCall]], details: Details, request: Any
    ) -> ClientCall:
        method = _method(details.method, self._methods)
        span: Span | None = None
        tracer = self._tracer  # type: ignore[attr-defined]
        if tracer is not None and method.name not in self._without_spans:
            attributes = {**method.attributes, **self._server}
            span = tracer.start_span(method.name, None, SpanKind.CLIENT, attributes)
            details = _with_context(details, set_span_in_context(span, get_current()))
        rpc = _SentRpc(method, span)
        try:
            call = await continuation(details, request)
        except BaseException as error:
            rpc.failed(error)
            raise
        try:
            call.add_done_callback(rpc.done)
        except NotImplementedError:  # an inner interceptor returned something else than a call
            rpc.done(call)
        return call


class _UnaryUnary(_Client, UnaryUnaryAioClientInterceptor):
    async def intercept_unary_unary(
        self, continuation: Callable[..., Any], client_call_details: Details, request: Any
    ) -> ClientCall:
        return await self._observe(continuation, client_call_details, request)


class _UnaryStream(_Client, UnaryStreamAioClientInterceptor):
    async def intercept_unary_stream(
        self, continuation: Callable[..., Any], client_call_details: Details, request: Any
    ) -> ClientCall:
        return await self._observe(continuation, client_call_details, request)


class _StreamUnary(_Client, StreamUnaryAioClientInterceptor):
    async def intercept_stream_unary(
        self, continuation: Callable[..., Any], client_call_details: Details, request_iterator: Any
    ) -> ClientCall:
        return await self._observe(continuation, client_call_details, request_iterator)


class _StreamStream(_Client, StreamStreamAioClientInterceptor):
    async def intercept_stream_stream(
        self, continuation: Callable[..., Any], client_call_details: Details, request_iterator: Any
    ) -> ClientCall:
        return await self._observe(continuation, client_call_details, request_iterator)


def client_interceptors(
    tracing: Tracing | None, target: str, *, without_spans: Collection[str] = ()
) -> list[Any]:
    """Make a channel's interceptors, one per kind of RPC; ``target`` is "host:port".

    An interceptor adds a queue and a task to each message of a stream. Where that costs too much,
    use `unary_client_interceptors` and `observe_call`.
    """
    kinds = (_UnaryUnary, _UnaryStream, _StreamUnary, _StreamStream)
    return [kind(tracing, target, frozenset(without_spans)) for kind in kinds]


def unary_client_interceptors(tracing: Tracing | None, target: str) -> list[Any]:
    """Make a channel's interceptors for unary calls only; streams are not observed."""
    return [_UnaryUnary(tracing, target, frozenset())]


_OBSERVED: dict[str, Method] = {}


def observe_call(call: ClientCall, method: str) -> None:
    """Measure a stream without an interceptor; ``method`` is "package.Service/Method"."""
    call.add_done_callback(_SentRpc(_method(method, _OBSERVED), None).done)


class _SentRpc:
    """One RPC from its start to its status."""

    __slots__ = ("_method", "_span", "_started")

    def __init__(self, method: Method, span: Span | None) -> None:
        self._method = method
        self._span = span
        self._started = time.perf_counter()

    def done(self, call: ClientCall) -> None:
        """Record the status; called when gRPC has it."""
        code = _at_once(call.code(), grpc.StatusCode.UNKNOWN)
        self._end(code, _at_once(call.details(), "") or "")

    def failed(self, error: BaseException) -> None:
        """Record that no call was made: an interceptor or gRPC failed before."""
        code = grpc.StatusCode.UNKNOWN
        if isinstance(error, asyncio.CancelledError):
            code = grpc.StatusCode.CANCELLED
        elif isinstance(error, grpc.aio.AioRpcError):
            code = error.code()
        if self._span is not None and not isinstance(error, grpc.aio.AioRpcError):
            self._span.record_exception(error)
        self._end(code, str(error))

    def _end(self, code: grpc.StatusCode, details: str) -> None:
        self._method.observe(code.name, time.perf_counter() - self._started)
        span = self._span
        if span is None:
            return
        span.set_attribute("rpc.response.status_code", code.name)
        if code is not grpc.StatusCode.OK:
            span.set_attribute("error.type", code.name)
            span.set_status(Status(StatusCode.ERROR, details))
        span.end()


def _at_once(ready: Coroutine[Any, Any, T], otherwise: T) -> T:
    """Run a coroutine that doesn't wait, such as the status of a call that is over."""
    try:
        ready.send(None)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    ready.close()
    return otherwise


def _method(name: str | bytes, known: dict[str, Method]) -> Method:
    text = name.decode() if isinstance(name, bytes) else name
    method = known.get(text)
    if method is None:
        method = known[text] = Method(text, RPC_CLIENT_DURATION)
    return method


def _with_context(details: Details, context: Context) -> Details:
    carrier: dict[str, str] = {}
    PROPAGATOR.inject(carrier, context)
    metadata = grpc.aio.Metadata(*(details.metadata or ()))
    for key, value in carrier.items():
        metadata[key] = value
    return details._replace(metadata=metadata)


def _server(target: str) -> dict[str, str | int]:
    host, _, port = target.rpartition(":")
    if not port.isdigit():
        return {"server.address": target}
    return {"server.address": host.strip("[]"), "server.port": int(port)}
