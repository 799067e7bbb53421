"""The one place where a failure becomes a gRPC status."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any, NoReturn

import grpc

from millstream_server.runtime.drain import OpenHandlers
from millstream_server.runtime.errors import InternalError, ServingError, UnavailableError
from millstream_server.runtime.handlers import AroundInterceptor, Context, Deserializer, Handler
from millstream_server.runtime.status import DETAILS_KEY, to_status
from millstream_server.runtime.tracing import trace_id
from millstream_server.runtime.wire import Malformed, tolerant

logger = logging.getLogger(__name__)

_TOO_LATE = (grpc.aio.InternalError, grpc.aio.UsageError)
"""What grpc.aio raises when something is sent on an RPC that has ended."""


class ErrorInterceptor(AroundInterceptor):
    """Ends an RPC with the status its ServingError names.

    Anything uncaught ends as INTERNAL with an opaque id that finds the log line; its text stays
    here. Requests that don't parse end as INVALID_ARGUMENT.
    """

    def __init__(self, open_handlers: OpenHandlers | None = None) -> None:
        """Keep handlers that run in ``open_handlers``; a server that stops cuts and awaits them."""
        super().__init__()
        self._open = open_handlers or OpenHandlers()

    def covers(self, service: str) -> bool:
        """Every RPC."""
        return True

    def deserializer(self, handler: Handler) -> Deserializer:
        """Let what doesn't parse through to `around`."""
        return tolerant(handler.request_deserializer)

    @contextlib.asynccontextmanager
    async def around(
        self, method: str, request: Any, context: Context
    ) -> AsyncIterator[tuple[Any, Context]]:
        """Make a status of whatever fails within."""
        with self._open.track():
            try:
                yield _checked(request), context
            except asyncio.CancelledError:
                if not self._open.cutting:
                    raise
                await _abort(context, method, _cut_off())
            except Exception as error:  # noqa: BLE001 - the one catch-all
                await _abort(context, method, error)

    def _generator(
        self, behavior: Callable[..., Any], method: str
    ) -> Callable[[Any, Context], AsyncIterator[Any]]:
        handlers = self._open

        async def wrapped(request: Any, context: Context) -> AsyncIterator[Any]:
            task = asyncio.current_task()
            async with self.around(method, request, context) as (inner_request, inner_context):
                generator = behavior(inner_request, inner_context)
                async with contextlib.aclosing(generator) as responses:
                    async for response in responses:
                        handlers.sending.add(task)
                        try:
                            yield response
                        finally:
                            handlers.sending.discard(task)
                        if handlers.cutting:
                            raise asyncio.CancelledError

        return wrapped


def _cut_off() -> UnavailableError:
    if (task := asyncio.current_task()) is not None:
        task.uncancel()  # it goes on, to say why it ends
    return UnavailableError("this server had to shut down before this was done; send it again")


def _checked(request: Any) -> Any:
    if isinstance(request, Malformed):
        raise request.error
    return _checked_stream(request) if hasattr(request, "__aiter__") else request


async def _checked_stream(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
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
