"""Spans and metrics of the RPCs that a client sends; the other end is `rpc_telemetry`."""

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

from millstream_server.runtime.metrics import RPC_CLIENT_DURATION
from millstream_server.runtime.rpc_telemetry import Method
from millstream_server.runtime.tracing import PROPAGATOR, Tracing

T = TypeVar("T")
Details = Any
Call = Any


class _Client:
    """What the four kinds of client interceptor have in common.

    They answer gRPC's own call object, and hear of its end from it: so it keeps its whole API, and
    it doesn't matter whether anybody reads it to its end.
    """

    def __init__(self, tracing: Tracing | None, target: str, without_spans: frozenset[str]) -> None:
        super().__init__(tracing.tracer if tracing else None)  # type: ignore[call-arg]
        self._server = _server(target)
        self._without_spans = without_spans
        self._methods: dict[str, Method] = {}

    async def _observe(
        self, continuation: Callable[..., Awaitable[Call]], details: Details, request: Any
    ) -> Call:
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
        except NotImplementedError:  # an interceptor further in has answered, without any call
            rpc.done(call)
        return call


class _UnaryUnary(_Client, UnaryUnaryAioClientInterceptor):
    async def intercept_unary_unary(
        self, continuation: Callable[..., Any], client_call_details: Details, request: Any
    ) -> Call:
        return await self._observe(continuation, client_call_details, request)


class _UnaryStream(_Client, UnaryStreamAioClientInterceptor):
    async def intercept_unary_stream(
        self, continuation: Callable[..., Any], client_call_details: Details, request: Any
    ) -> Call:
        return await self._observe(continuation, client_call_details, request)


class _StreamUnary(_Client, StreamUnaryAioClientInterceptor):
    async def intercept_stream_unary(
        self, continuation: Callable[..., Any], client_call_details: Details, request_iterator: Any
    ) -> Call:
        return await self._observe(continuation, client_call_details, request_iterator)


class _StreamStream(_Client, StreamStreamAioClientInterceptor):
    async def intercept_stream_stream(
        self, continuation: Callable[..., Any], client_call_details: Details, request_iterator: Any
    ) -> Call:
        return await self._observe(continuation, client_call_details, request_iterator)


def client_interceptors(
    tracing: Tracing | None, target: str, *, without_spans: Collection[str] = ()
) -> list[Any]:
    """Make a channel's interceptors, one for each kind of RPC; ``target`` is its "host:port".

    With any interceptor of its kind, each of a stream's messages takes a detour through a queue and
    a task. Where that counts, leave the kind out and hand the call to `observe_call`.
    """
    kinds = (_UnaryUnary, _UnaryStream, _StreamUnary, _StreamStream)
    return [kind(tracing, target, frozenset(without_spans)) for kind in kinds]


def unary_client_interceptors(tracing: Tracing | None, target: str) -> list[Any]:
    """Make a channel's interceptors for calls without streams; those with are left alone."""
    return [_UnaryUnary(tracing, target, frozenset())]


_OBSERVED: dict[str, Method] = {}


def observe_call(call: Call, method: str) -> None:
    """Measure a stream that no interceptor sees; ``method`` is "package.Service/Method"."""
    call.add_done_callback(_SentRpc(_method(method, _OBSERVED), None).done)


class _SentRpc:
    """One RPC from its start to its status."""

    __slots__ = ("_method", "_span", "_started")

    def __init__(self, method: Method, span: Span | None) -> None:
        self._method = method
        self._span = span
        self._started = time.perf_counter()

    def done(self, call: Call) -> None:
        """Be told by gRPC that the status is there."""
        code = _at_once(call.code(), grpc.StatusCode.UNKNOWN)
        self._end(code, _at_once(call.details(), "") or "")

    def failed(self, error: BaseException) -> None:
        """There is no call: something on the way to it failed."""
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


def _at_once(answer: Coroutine[Any, Any, T], otherwise: T) -> T:
    """Run a coroutine that has nothing to wait for: a call that is over knows its status."""
    try:
        answer.send(None)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    answer.close()
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
