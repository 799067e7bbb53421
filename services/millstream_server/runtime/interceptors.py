"""The one place where a failure becomes a gRPC status."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn

import grpc

from millstream_server.runtime.errors import InternalError, ServingError
from millstream_server.runtime.status import DETAILS_KEY, to_status
from millstream_server.runtime.wire import Malformed, tolerant

# The generic forms exist in the stubs only, never at run time.
Context = Any
Handler = Any

logger = logging.getLogger(__name__)


class ErrorInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Ends an RPC with the status its ServingError names.

    Anything uncaught ends as INTERNAL with an opaque id that finds the log line; its text stays
    here. Requests that don't parse end as INVALID_ARGUMENT.
    """

    def __init__(self) -> None:
        """Wrap each method's handler once, at its first call."""
        self._guarded: dict[str, Handler] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """Wrap the method's handler."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method
        if method not in self._guarded:
            self._guarded[method] = self._guard(handler, method)
        return self._guarded[method]

    @staticmethod
    def _guard(handler: Handler, method: str) -> Handler:
        make, behavior = _parts(handler)
        if handler.response_streaming:
            guarded = (
                _guard_generator(behavior, method, streaming_in=handler.request_streaming)
                if inspect.isasyncgenfunction(behavior)
                else _guard_writer(behavior, method, streaming_in=handler.request_streaming)
            )
        else:
            guarded = _guard_writer(behavior, method, streaming_in=handler.request_streaming)
        return make(
            guarded,
            request_deserializer=tolerant(handler.request_deserializer),
            response_serializer=handler.response_serializer,
        )


def _parts(handler: Handler) -> tuple[Callable[..., Handler], Callable[..., Any]]:
    if handler.request_streaming and handler.response_streaming:
        return grpc.stream_stream_rpc_method_handler, handler.stream_stream
    if handler.request_streaming:
        return grpc.stream_unary_rpc_method_handler, handler.stream_unary
    if handler.response_streaming:
        return grpc.unary_stream_rpc_method_handler, handler.unary_stream
    return grpc.unary_unary_rpc_method_handler, handler.unary_unary


def _guard_generator(
    behavior: Callable[..., AsyncIterator[Any]], method: str, *, streaming_in: bool
) -> Callable[[Any, Context], AsyncIterator[Any]]:
    async def guarded(request: Any, context: Context) -> AsyncIterator[Any]:
        try:
            async for response in behavior(_checked(request, streaming_in=streaming_in), context):
                yield response
        except Exception as error:  # noqa: BLE001 - the one catch-all
            await _abort(context, method, error)

    return guarded


def _guard_writer(
    behavior: Callable[..., Awaitable[Any]], method: str, *, streaming_in: bool
) -> Callable[[Any, Context], Awaitable[Any]]:
    async def guarded(request: Any, context: Context) -> Any:
        try:
            return await behavior(_checked(request, streaming_in=streaming_in), context)
        except Exception as error:  # noqa: BLE001 - the one catch-all
            await _abort(context, method, error)

    return guarded


def _checked(request: Any, *, streaming_in: bool) -> Any:
    if streaming_in:
        return _checked_stream(request)
    if isinstance(request, Malformed):
        raise request.error
    return request


async def _checked_stream(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for request in requests:
        if isinstance(request, Malformed):
            raise request.error
        yield request


async def _abort(context: Context, method: str, error: Exception) -> NoReturn:
    if isinstance(error, grpc.aio.AbortError):  # the handler, or a library's, has ended the RPC
        raise error
    if not isinstance(error, ServingError):
        internal = InternalError.with_id()
        logger.error(
            "method=%s error_id=%s uncaught failure", method, internal.error_id, exc_info=error
        )
        error = internal
    else:
        logger.debug("method=%s code=%s reason=%s", method, error.code.name, error.reason)
    status = to_status(error)
    try:
        await context.abort(
            error.code,
            error.message,
            trailing_metadata=((DETAILS_KEY, status.SerializeToString()),),
        )
    except asyncio.InvalidStateError:  # the RPC is over already: the client left first
        logger.debug("method=%s ended before its status could be sent", method)
    raise error
