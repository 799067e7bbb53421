"""Spans and metrics of the RPCs that a server answers.

Built on opentelemetry-instrumentation-grpc, which knows how to hang itself into grpc.aio, with
everything replaced that fails there: handlers that read and write, streams that are cancelled or
left early, statuses, exceptions, conventions. tests/contract/test_rpc_telemetry.py has each failure
as a test of theirs and ours.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextvars import Token
from typing import Any

import grpc
from opentelemetry.context import Context, attach, detach
from opentelemetry.instrumentation.grpc._aio_server import OpenTelemetryAioServerInterceptor
from opentelemetry.instrumentation.grpc._server import _wrap_rpc_behavior
from opentelemetry.instrumentation.grpc._utilities import _server_status
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context
from prometheus_client import Histogram

from millstream_server.runtime.auth import CallerKind, caller
from millstream_server.runtime.metrics import RPC_SERVER_DURATION, RPC_SERVER_OPEN
from millstream_server.runtime.tracing import PROPAGATOR, Tracing

Handler = Any
ServicerContext = Any

# Health, reflection, channelz, load reports, discovery: asked all the time, by machines.
_PLUMBING = ("grpc.", "xds.", "envoy.")
_OTHER = "/_OTHER"
"""The conventions' name for methods nobody serves; where callers must log in, they are answered."""
_STATUS_BY_NUMBER = {code.value[0]: code for code in grpc.StatusCode}


class Method:
    """What is the same for every call of one method."""

    def __init__(self, full_name: str, durations: Histogram) -> None:
        """Observe into ``durations``; a name may begin with the slash that it has on the wire."""
        self.name = full_name.lstrip("/")
        self.attributes = {"rpc.system.name": "grpc", "rpc.method": self.name}
        self._durations = durations
        self._by_code: dict[str, Histogram] = {}

    def observe(self, code: str, seconds: float) -> None:
        """Count a call that ended with ``code``, a status code's name."""
        child = self._by_code.get(code)
        if child is None:
            child = self._by_code[code] = self._durations.labels("grpc", self.name, code)
        child.observe(seconds)


class TelemetryServerInterceptor(OpenTelemetryAioServerInterceptor):
    """Measures every RPC and, with tracing, makes it a span; must be the chain's outermost.

    The status is what the client gets, so that of `RpcInterceptor`, which comes after this one.
    Health, reflection and their like are left alone.
    """

    def __init__(
        self,
        tracing: Tracing | None = None,
        *,
        served: Collection[str],
        without_spans: Collection[str] = (),
    ) -> None:
        """Without ``tracing`` only measure.

        Methods that aren't ``served`` ("/millstream.v1.DecodeService/Decode") go by one name: they
        are answered too, with a refusal, and callers may make up any number of them.

        ``without_spans`` are methods ("millstream.v1.DecodeService/Decode") whose streams carry
        many requests for hours: no span, but the context they come with is their requests'.
        """
        super().__init__(tracing.tracer if tracing else None)  # type: ignore[no-untyped-call]
        self._without_spans = frozenset(without_spans)
        self._served = frozenset(served)
        self._wrapped: dict[str, Handler] = {}

    async def intercept_service(  # type: ignore[override]
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """Wrap the method's handler; once, if it is served."""
        handler = await continuation(handler_call_details)
        method: str = handler_call_details.method
        if handler is None or method[1:].startswith(_PLUMBING):
            return handler
        if method not in self._served:
            return self._wrap(handler, _OTHER)
        if method not in self._wrapped:
            self._wrapped[method] = self._wrap(handler, method)
        return self._wrapped[method]

    def _wrap(self, handler: Handler, full_name: str) -> Handler:
        method = _ServedMethod(full_name, self._tracer)
        method.spans = self._tracer is not None and method.name not in self._without_spans

        def wrapper(behavior: Callable[..., Any], _in: bool, _out: bool) -> Callable[..., Any]:  # noqa: FBT001 - theirs
            if inspect.isasyncgenfunction(behavior):
                return _around_generator(behavior, method)
            return _around_coroutine(behavior, method)

        return _wrap_rpc_behavior(handler, wrapper)  # type: ignore[no-untyped-call]


class _ServedMethod(Method):
    def __init__(self, full_name: str, tracer: Any) -> None:
        super().__init__(full_name, RPC_SERVER_DURATION)
        self.tracer = tracer
        self.spans = False
        self.open = RPC_SERVER_OPEN.labels(self.name)


def _around_generator(
    behavior: Callable[..., AsyncIterator[Any]], method: _ServedMethod
) -> Callable[..., Any]:
    async def observed(request: Any, context: ServicerContext) -> AsyncIterator[Any]:
        rpc = _ServedRpc(method, context)
        try:
            async for response in behavior(request, context):
                yield response
        except BaseException as error:
            rpc.end(error)
            raise
        rpc.end(None)

    return observed


def _around_coroutine(
    behavior: Callable[..., Awaitable[Any]], method: _ServedMethod
) -> Callable[..., Any]:
    async def observed(request: Any, context: ServicerContext) -> Any:
        rpc = _ServedRpc(method, context)
        try:
            response = await behavior(request, context)
        except BaseException as error:
            rpc.end(error)
            raise
        rpc.end(None)
        return response

    return observed


class _ServedRpc:
    """One RPC from its handler's start to its end."""

    __slots__ = ("_context", "_method", "_span", "_started", "_task", "_token")

    def __init__(self, method: _ServedMethod, context: ServicerContext) -> None:
        self._method = method
        self._context = context
        self._started = time.perf_counter()
        self._span: Span | None = None
        self._token: Token[Context] | None = None
        method.open.inc()
        if method.tracer is not None:
            self._trace(method, context)

    def _trace(self, method: _ServedMethod, context: ServicerContext) -> None:
        here = PROPAGATOR.extract(dict(context.invocation_metadata() or ()), Context())
        if method.spans:
            self._span = method.tracer.start_span(
                method.name, here, SpanKind.SERVER, {**method.attributes, **_peer(context.peer())}
            )
            here = set_span_in_context(self._span, here)
        self._task = asyncio.current_task()
        self._token = attach(here)

    def end(self, error: BaseException | None) -> None:
        """Take down how it ended."""
        context = self._context
        code = _status(context, error)
        self._method.open.dec()
        self._method.observe(code.name, time.perf_counter() - self._started)
        if self._span is not None:
            _end_span(self._span, code, context.details(), error)
        # In another task the context is another one, and this one's is gone with its task.
        if self._token is not None and asyncio.current_task() is self._task:
            detach(self._token)


def _end_span(span: Span, code: grpc.StatusCode, details: str, error: BaseException | None) -> None:
    span.set_attribute("rpc.response.status_code", code.name)
    if (who := caller()).kind is not CallerKind.ANONYMOUS:
        span.set_attribute("enduser.id", who.name)
    status = _server_status(code, details)  # type: ignore[no-untyped-call]
    if code is grpc.StatusCode.CANCELLED:
        status = Status(StatusCode.ERROR, "cancelled by the client")
    if status.status_code is StatusCode.ERROR:
        span.set_attribute("error.type", code.name)
        span.set_status(status)
        cause = _cause(error)
        if cause is not None:
            span.record_exception(cause)
    span.end()


def _status(context: ServicerContext, error: BaseException | None) -> grpc.StatusCode:
    """Answer the status that the client gets."""
    if isinstance(error, (asyncio.CancelledError, GeneratorExit)):
        late = context.time_remaining() == 0
        return grpc.StatusCode.DEADLINE_EXCEEDED if late else grpc.StatusCode.CANCELLED
    code = context.code()
    if isinstance(code, int):
        code = _STATUS_BY_NUMBER.get(code, grpc.StatusCode.UNKNOWN)
    if isinstance(error, grpc.aio.AbortError) or error is None:
        return code or grpc.StatusCode.OK
    return code or grpc.StatusCode.UNKNOWN


def _cause(error: BaseException | None) -> BaseException | None:
    """Find the exception worth telling: not the abort, but what was aborted for."""
    if isinstance(error, grpc.aio.AbortError):
        return error.__cause__ or error.__context__
    return error if isinstance(error, Exception) else None


def _peer(peer: str) -> dict[str, str | int]:
    """Read "ipv4:127.0.0.1:4711" or "ipv6:%5B::1%5D:4711"; nothing for other kinds."""
    kind, _, rest = peer.partition(":")
    host, _, port = rest.rpartition(":")
    if kind not in ("ipv4", "ipv6") or not port.isdigit():
        return {}
    host = host.replace("%5B", "").replace("%5D", "").strip("[]")
    return {"client.address": host, "client.port": int(port)}
