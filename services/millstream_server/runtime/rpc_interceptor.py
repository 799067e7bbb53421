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
    behavior,
    is_generator,
    only,
)
from millstream_server.runtime.status import to_trailers
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
        self._wrapped: dict[str, Handler] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """Wrap the method's handler; once, if somebody serves it."""
        handler = await continuation(handler_call_details)
        method: str = handler_call_details.method
        if handler is None:
            return self._wrap(self._unknown(method), method)
        if method not in self._wrapped:
            self._wrapped[method] = self._wrap(handler, method)
        return self._wrapped[method]

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
            except asyncio.CancelledError as error:
                if self._open.cutting:
                    await _abort(context, self._method, _cut_off())
                if _cancelled():
                    raise
                # Something that was waited for was cancelled; the caller still waits.
                await _abort(context, self._method, error)
            except Exception as error:  # noqa: BLE001 - the one catch-all
                await _abort(context, self._method, error)


def _cancelled() -> bool:
    """Tell whether the caller's leaving, his deadline or a stop has cancelled this very RPC."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _cut_off() -> UnavailableError:
    if (task := asyncio.current_task()) is not None:
        task.uncancel()  # it goes on, to say why it ends
    return UnavailableError("this server had to shut down before this was done; send it again")


async def _parsed(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for request in requests:
        if isinstance(request, Malformed):
            raise request.error
        yield request


async def _abort(context: Context, method: str, error: BaseException) -> NoReturn:
    """End the RPC with the status of ``error``; if it has ended before, nobody hears of it."""
    if isinstance(error, grpc.aio.AbortError):  # the handler, or a library's, has ended the RPC
        raise error
    told = error if isinstance(error, ServingError) else InternalError.with_id()
    # Either the client has left, or somebody misused gRPC: the attempt to tell him will show.
    late = isinstance(error, _TOO_LATE)
    if not late:
        _log(context, method, error, told)
    try:
        await context.abort(
            told.code,
            told.message,
            # abort's trailers replace those set before, such as a load report
            trailing_metadata=(*(context.trailing_metadata() or ()), *to_trailers(told)),
        )
    except grpc.aio.AbortError:
        if late:
            _log(context, method, error, told)
        raise
    except (*_TOO_LATE, asyncio.InvalidStateError):
        logger.debug("method=%s ended before its status could be sent", method)
        raise asyncio.CancelledError from error
    raise error


def _log(context: Context, method: str, error: BaseException, told: ServingError) -> None:
    if told is error:
        logger.debug("method=%s code=%s reason=%s", method, told.code.name, told.reason)
        return
    logger.error(
        "method=%s error_id=%s trace_id=%s uncaught failure",
        method,
        told.error_id,
        trace_id(context.invocation_metadata()) or "-",
        exc_info=error,
    )
