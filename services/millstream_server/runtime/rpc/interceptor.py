"""Runs every RPC: layers, then servicer; the one place where a failure becomes a status."""

from __future__ import annotations

import asyncio
import inspect
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, NoReturn

import grpc

from millstream_server.runtime.errors import (
    Code,
    InternalError,
    InvalidRequestError,
    ServingError,
    StatusError,
    UnknownMethodError,
)
from millstream_server.runtime.rpc.grpc_call import Context, GrpcCall, Requests
from millstream_server.runtime.rpc.layer import Layer, Outcome, Visit
from millstream_server.runtime.rpc.open_calls import OpenCalls
from millstream_server.runtime.rpc.parsing import tolerant
from millstream_server.runtime.rpc.status import GRPC_CODES, to_trailers
from millstream_server.runtime.telemetry.log import get_log
from millstream_server.runtime.telemetry.tracing import trace_id

log = get_log(__name__)

Handler = Any
"""grpc.RpcMethodHandler; its generic form exists in the stubs only."""

_TOO_LATE = (grpc.aio.InternalError, grpc.aio.UsageError)
"""What grpc.aio raises when something is sent on an RPC that has ended."""
_FIRST_MESSAGE_S = 30.0
_LONGEST_NAME = 200
_OK = Outcome(Code.OK)


class RpcInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Runs the layers around each RPC, and ends it with the status of its failure.

    Other exceptions end the RPC with INTERNAL and an id of the log line; their text is not sent.
    Requests that don't parse end with INVALID_ARGUMENT. Unknown methods pass through the
    layers too, so that unauthenticated callers can't find out which methods exist.

    Handlers read and write on grpc.aio's context themselves, so that a message passes no further
    generator between grpc.aio and the servicer, however many layers there are.
    """

    def __init__(
        self,
        *layers: Layer,
        services: Sequence[str] = (),
        open_calls: OpenCalls | None = None,
    ) -> None:
        """Run ``layers`` in this order, the first outermost.

        ``services`` are named in the error of an unknown method. RPCs whose handlers run are in
        ``open_calls``; a server that stops cuts and awaits them.
        """
        self._layers = layers
        self._services = services
        self._open = open_calls or OpenCalls()
        self._wrapped: dict[str, Handler] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """Wrap the method's handler; only once per method that is served."""
        method: str = handler_call_details.method
        wrapped = self._wrapped.get(method)
        if wrapped is not None:
            return wrapped
        handler = await continuation(handler_call_details)
        if handler is None:
            return self._wrap(self._unknown(method), method)
        wrapped = self._wrapped[method] = self._wrap(handler, method)
        return wrapped

    def _wrap(self, handler: Handler, method: str) -> Handler:
        """Make it a handler of a request stream, which is the same on the wire.

        For a single request grpc.aio would read it before our code runs: a caller that sends none
        could keep an RPC open for ever, neither counted nor authenticated, and a caller that
        closes without a message would never get a status.
        """
        served = _Method(
            method,
            _servicer(handler),
            [layer for layer in self._layers if layer.covers(method)],
            self._open,
            lone=not handler.request_streaming,
        )
        make: Callable[..., Handler] = grpc.stream_unary_rpc_method_handler
        if handler.response_streaming:
            make = grpc.stream_stream_rpc_method_handler
        return make(
            served.stream if handler.response_streaming else served.unary,
            tolerant(handler.request_deserializer),
            handler.response_serializer,
        )

    def _unknown(self, method: str) -> Handler:
        """Make a handler that ends with UNIMPLEMENTED; as a stream it fits every kind of call."""
        served = f"; it serves {', '.join(self._services)}" if self._services else ""
        message = f"this server has no method {method[1:_LONGEST_NAME]}{served}"

        async def refuse(_requests: object, _call: object) -> AsyncIterator[NoReturn]:
            raise UnknownMethodError(message)
            yield

        return grpc.stream_stream_rpc_method_handler(refuse)


def _servicer(handler: Handler) -> Callable[..., Any]:
    sent = "stream" if handler.request_streaming else "unary"
    returned = "stream" if handler.response_streaming else "unary"
    servicer: Callable[..., Any] = getattr(handler, f"{sent}_{returned}")
    if handler.response_streaming and not inspect.isasyncgenfunction(servicer):
        raise TypeError(f"{servicer} must be an async generator of its responses")
    return servicer


class _Method:
    """Serves every call of one method."""

    def __init__(
        self,
        name: str,
        servicer: Callable[..., Any],
        layers: Sequence[Layer],
        open_calls: OpenCalls,
        *,
        lone: bool,
    ) -> None:
        self._name = name
        self._servicer = servicer
        self._layers = layers
        self._open = open_calls
        self._lone = lone

    async def stream(self, _requests: object, context: Context) -> None:
        """Serve a response stream."""
        await self._serve(self._send, context)

    async def unary(self, _requests: object, context: Context) -> Any:
        """Serve a single response."""
        return await self._serve(self._servicer, context)

    async def _send(self, request: Any, call: GrpcCall) -> None:
        responses = self._servicer(request, call)
        write = call.context.write
        try:
            async for response in responses:
                await write(response)
        except BaseException:
            # Closed here, not later by the garbage collector.
            await responses.aclose()
            raise

    async def _serve(self, servicer: Callable[..., Awaitable[Any]], context: Context) -> Any:
        """Serve one call; a failure, wherever it is raised, ends it with a status."""
        call = GrpcCall(self._name, context)
        visits: list[Visit] = []
        self._open.add(call)
        try:
            try:
                for layer in self._layers:
                    visit = layer.enter(call)
                    if visit is not None:
                        visits.append(visit)
                requests = Requests(context.read, visits)
                request = await _only(requests) if self._lone else requests
                response = await servicer(request, call)
            except BaseException as error:
                try:
                    await _fail(call, visits, _leave_layers(visits, error))
                finally:
                    # gRPC keeps the error until the next garbage collection, and with it what the
                    # handler had at hand: megabytes of an image.
                    traceback.clear_frames(error.__traceback__)
                raise
            call.end()
            failed = _leave_layers(visits, None)
            if failed is not None:
                await _fail(call, visits, failed)
            if call.trailers:
                context.set_trailing_metadata(call.trailers)
            _report_outcome(visits, _OK)
            return response
        finally:
            self._open.remove(call)


async def _only(requests: Requests) -> Any:
    """Read the one message of a call.

    Raises:
        InvalidRequestError: there is none, or none in time.
    """
    try:
        async with asyncio.timeout(_FIRST_MESSAGE_S):
            return await anext(requests)
    except TimeoutError:
        raise InvalidRequestError(
            f"the request message did not come within {_FIRST_MESSAGE_S:g} s"
        ) from None
    except StopAsyncIteration:
        raise InvalidRequestError("the request message is missing") from None


def _leave_layers(visits: Sequence[Visit], error: BaseException | None) -> BaseException | None:
    """Leave the layers, innermost first; return the failure, which a layer may replace."""
    for visit in reversed(visits):
        try:
            visit.leave()
        except Exception as failed:  # noqa: BLE001 - it becomes the status
            error = failed
    return error


async def _fail(call: GrpcCall, visits: Sequence[Visit], error: BaseException | None) -> None:
    """End the RPC with the status of ``error``; return only if none can be sent: then re-raise."""
    call.end()
    if isinstance(error, asyncio.CancelledError):
        # If neither holds, something the handler awaited was cancelled, and the caller still waits.
        failure = call.take_failure()
        if failure is None and call.was_cancelled():
            _report_outcome(visits, _cancelled(call))
            return
        error = failure or error
    elif not isinstance(error, Exception):  # the process ends
        _report_outcome(visits, Outcome(Code.UNKNOWN))
        return
    reported = error if isinstance(error, (ServingError, StatusError)) else InternalError.with_id()
    # Either the caller has gone, or gRPC was misused: the abort below shows which.
    late = isinstance(error, _TOO_LATE)
    if not late:
        _log(call, error, reported)
    try:
        await call.context.abort(
            GRPC_CODES[reported.code], reported.message, (*call.trailers, *to_trailers(reported))
        )
    except grpc.aio.AbortError:
        if late:
            _log(call, error, reported)
        _report_outcome(visits, Outcome(reported.code, reported.message, error))
        raise
    except (*_TOO_LATE, asyncio.InvalidStateError):
        log.debug("RPC ended before its status could be sent", method=call.method)
        _report_outcome(visits, _cancelled(call))
        raise asyncio.CancelledError from error


def _cancelled(call: GrpcCall) -> Outcome:
    """Return the outcome of an RPC that its caller cancelled or whose deadline passed."""
    if call.time_left_s == 0:
        return Outcome(Code.DEADLINE_EXCEEDED, "the caller's deadline passed")
    return Outcome(Code.CANCELLED, "cancelled by the client")


def _report_outcome(visits: Sequence[Visit], outcome: Outcome) -> None:
    for visit in visits:
        visit.ended(outcome)


def _log(call: GrpcCall, error: BaseException, reported: ServingError | StatusError) -> None:
    if reported is error:
        reason = reported.reason if isinstance(reported, ServingError) else "-"
        log.debug("RPC refused", method=call.method, code=reported.code.name, reason=reason)
        return
    log.error(
        "uncaught failure",
        error=error,
        method=call.method,
        error_id=reported.error_id if isinstance(reported, ServingError) else "-",
        trace_id=trace_id(call.metadata) or "-",
    )
