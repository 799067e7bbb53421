"""What every RPC passes, and the one place where a failure becomes a gRPC status."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, NoReturn

import grpc

from millstream_server.runtime.drain import OpenHandlers
from millstream_server.runtime.errors import (
    InternalError,
    ServingError,
    UnavailableError,
    UnknownMethodError,
)
from millstream_server.runtime.handlers import (
    Context,
    Handler,
    Layer,
    Wrapped,
    behavior,
    is_generator,
    only,
)
from millstream_server.runtime.status import DETAILS_KEY, to_status
from millstream_server.runtime.tracing import trace_id
from millstream_server.runtime.wire import Malformed, tolerant

logger = logging.getLogger(__name__)

_TOO_LATE = (grpc.aio.InternalError, grpc.aio.UsageError)
"""What grpc.aio raises when something is sent on an RPC that has ended."""
_LONGEST_NAME = 200


class RpcInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Enters the layers around each RPC, and ends it with the status its ServingError names.

    Anything uncaught ends as INTERNAL with an opaque id that finds the log line; its text stays
    here. Requests that don't parse end as INVALID_ARGUMENT. Methods that nobody serves pass the
    layers like any other, so that strangers don't learn which those are.

    However many layers there are, a message of an answer passes one generator.
    """

    def __init__(
        self,
        *layers: Layer,
        services: Sequence[str] = (),
        open_handlers: OpenHandlers | None = None,
    ) -> None:
        """Enter ``layers`` in this order, the first outermost.

        ``services`` are named to those who call something else. Handlers that run are kept in
        ``open_handlers``; a server that stops cuts and awaits them.
        """
        self._layers = layers
        self._services = services
        self._open = open_handlers or OpenHandlers()
        self._wrapped = Wrapped()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """Wrap the method's handler, at its first call."""
        handler = await continuation(handler_call_details)
        method: str = handler_call_details.method
        if handler is None:
            return self._wrap(self._unknown(method), method)
        return self._wrapped.get(handler, lambda: self._wrap(handler, method))

    def _wrap(self, handler: Handler, method: str) -> Handler:
        """Make it a handler of streams of requests, which on the wire is the same."""
        layers = [layer for layer in self._layers if layer.covers(method)]
        call = _Call(method, layers, self._open, lone=not handler.request_streaming)
        wrap = call.generator if is_generator(handler) else call.coroutine
        answers = "stream" if handler.response_streaming else "unary"
        make: Callable[..., Handler] = getattr(grpc, f"stream_{answers}_rpc_method_handler")
        return make(
            wrap(behavior(handler)),
            tolerant(handler.request_deserializer),
            handler.response_serializer,
        )

    def _unknown(self, method: str) -> Handler:
        """Any client understands a stream that ends with a status."""
        served = f"; it serves {', '.join(self._services)}" if self._services else ""
        message = f"this server has no method {method[1:_LONGEST_NAME]}{served}"

        async def refuse(_requests: object, _context: object) -> NoReturn:
            raise UnknownMethodError(message)

        return grpc.stream_stream_rpc_method_handler(refuse)


class _Call:
    """What is around every call of one method."""

    def __init__(
        self, method: str, layers: Sequence[Layer], handlers: OpenHandlers, *, lone: bool
    ) -> None:
        self._method = method
        self._layers = layers
        self._open = handlers
        self._lone = lone

    def generator(
        self, inner: Callable[..., Any]
    ) -> Callable[[AsyncIterator[Any], Context], AsyncIterator[Any]]:
        handlers = self._open

        async def wrapped(requests: AsyncIterator[Any], context: Context) -> AsyncIterator[Any]:
            task = asyncio.current_task()
            async with (
                self._entered(requests, context) as arguments,
                # Closed here, and not when the garbage collector finds it.
                contextlib.aclosing(inner(*arguments)) as responses,
            ):
                async for response in responses:
                    handlers.sending.add(task)
                    try:
                        yield response
                    finally:
                        handlers.sending.discard(task)
                    if handlers.cutting:
                        raise asyncio.CancelledError

        return wrapped

    def coroutine(
        self, inner: Callable[..., Awaitable[Any]]
    ) -> Callable[[AsyncIterator[Any], Context], Awaitable[Any]]:
        async def wrapped(requests: AsyncIterator[Any], context: Context) -> Any:
            async with self._entered(requests, context) as arguments:
                return await inner(*arguments)

        return wrapped

    @contextlib.asynccontextmanager
    async def _entered(
        self, requests: AsyncIterator[Any], context: Context
    ) -> AsyncIterator[tuple[Any, Context]]:
        """Make a status of whatever fails within."""
        with self._open.track():
            try:
                with contextlib.ExitStack() as stack:
                    given = _parsed(requests), context
                    for layer in self._layers:
                        given = stack.enter_context(layer.around(*given))
                    yield (await only(given[0]), given[1]) if self._lone else given
            except asyncio.CancelledError:
                if not self._open.cutting:
                    raise
                await _abort(context, self._method, _cut_off())
            except Exception as error:  # noqa: BLE001 - the one catch-all
                await _abort(context, self._method, error)


def _cut_off() -> UnavailableError:
    if (task := asyncio.current_task()) is not None:
        task.uncancel()  # it goes on, to say why it ends
    return UnavailableError("this server had to shut down before this was done; send it again")


async def _parsed(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for request in requests:
        if isinstance(request, Malformed):
            raise request.error
        yield request


async def _abort(context: Context, method: str, error: Exception) -> NoReturn:
    if isinstance(error, grpc.aio.AbortError):  # the handler, or a library's, has ended the RPC
        raise error
    if isinstance(error, _TOO_LATE):
        _over(method, error)
    if not isinstance(error, ServingError):
        internal = InternalError.with_id()
        logger.error(
            "method=%s error_id=%s trace_id=%s uncaught failure",
            method,
            internal.error_id,
            trace_id(context.invocation_metadata()) or "-",
            exc_info=error,
        )
        error = internal
    else:
        logger.debug("method=%s code=%s reason=%s", method, error.code.name, error.reason)
    status = to_status(error)
    try:
        await context.abort(
            error.code,
            error.message,
            # abort's trailers replace those set before, such as a load report
            trailing_metadata=(
                *(context.trailing_metadata() or ()),
                (DETAILS_KEY, status.SerializeToString()),
            ),
        )
    except (*_TOO_LATE, asyncio.InvalidStateError):
        _over(method, error)
    raise error


def _over(method: str, error: Exception) -> NoReturn:
    """The RPC ended before: the client left first, and nobody hears of this any more."""
    logger.debug("method=%s ended before its status could be sent", method)
    raise asyncio.CancelledError from error
