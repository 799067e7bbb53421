"""Putting something around the handlers of RPCs, whatever their kind."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import grpc

from millstream_server.runtime.errors import InvalidRequestError

# The generic forms exist in the stubs only, never at run time.
Context = Any
Handler = Any
Deserializer = Callable[[bytes], Any] | None

_FIRST_MESSAGE_S = 30.0


class Wrapped:
    """What handlers were wrapped into, by handler: a server has a fixed number of them.

    By method they could be any number, where made-up ones are answered too.
    """

    def __init__(self) -> None:
        """Start empty."""
        self._by_id: dict[int, tuple[Handler, Handler]] = {}

    def get(self, handler: Handler, wrap: Callable[[], Handler]) -> Handler:
        """Answer what ``handler`` was wrapped into, or wrap it now."""
        known = self._by_id.get(id(handler))
        if known is None:  # the handler is kept, so that its id stays its own
            known = self._by_id[id(handler)] = (handler, wrap())
        return known[1]


class AroundInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """An interceptor that is an asynchronous context manager around each RPC's handler.

    A subclass says which services it `covers` and what happens `around` a call; each method's
    handler is wrapped once, at its first call. The context manager is left when the handler has
    ended, for whatever reason: a stream's when the stream has.
    """

    def __init__(self) -> None:
        """Wrap nothing yet."""
        self._wrapped = Wrapped()

    def covers(self, service: str) -> bool:
        """Whether this full service name's RPCs concern us."""
        raise NotImplementedError

    def around(
        self, method: str, request: Any, context: Context
    ) -> AbstractAsyncContextManager[tuple[Any, Context]]:
        """Answer what to enter; it yields the request, or request stream, and context to use."""
        raise NotImplementedError

    def deserializer(self, handler: Handler) -> Deserializer:
        """Answer how requests are read; as before, unless a subclass knows better."""
        deserialize: Deserializer = handler.request_deserializer
        return deserialize

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """Wrap the method's handler, at its first call."""
        handler = await continuation(handler_call_details)
        method: str = handler_call_details.method
        if handler is None or not self.covers(service_of(method)):
            return handler
        return self._wrapped.get(handler, lambda: self._wrap(handler, method))

    def _wrap(self, handler: Handler, method: str) -> Handler:
        make, behavior = parts(handler)
        wrap = self._generator if inspect.isasyncgenfunction(behavior) else self._coroutine
        return make(
            wrap(behavior, method),
            request_deserializer=self.deserializer(handler),
            response_serializer=handler.response_serializer,
        )

    def _generator(
        self, behavior: Callable[..., Any], method: str
    ) -> Callable[[Any, Context], AsyncIterator[Any]]:
        async def wrapped(request: Any, context: Context) -> AsyncIterator[Any]:
            async with self.around(method, request, context) as (inner_request, inner_context):
                # Closed here, and not when the garbage collector finds it.
                generator = behavior(inner_request, inner_context)
                async with contextlib.aclosing(generator) as responses:
                    async for response in responses:
                        yield response

        return wrapped

    def _coroutine(
        self, behavior: Callable[..., Awaitable[Any]], method: str
    ) -> Callable[[Any, Context], Awaitable[Any]]:
        async def wrapped(request: Any, context: Context) -> Any:
            async with self.around(method, request, context) as (inner_request, inner_context):
                return await behavior(inner_request, inner_context)

        return wrapped


class OneMessageInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Has methods of one request message read it when they are reached, not before.

    grpc.aio reads it first of all: a caller who sends none holds his RPC open for ever, uncounted
    and before he is asked who he is; one who closes without a message never gets a status. It must
    be the innermost: all others then see streams of requests, on the wire it is the same.
    """

    def __init__(self) -> None:
        """Wrap nothing yet."""
        self._wrapped = Wrapped()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """Wrap the method's handler, at its first call."""
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_streaming:
            return handler
        return self._wrapped.get(handler, lambda: _reading(handler))


def _reading(handler: Handler) -> Handler:
    _, behavior = parts(handler)
    answers = "stream" if handler.response_streaming else "unary"
    make: Callable[..., Handler] = getattr(grpc, f"stream_{answers}_rpc_method_handler")
    wrap = _reading_generator if inspect.isasyncgenfunction(behavior) else _reading_coroutine
    return make(wrap(behavior), handler.request_deserializer, handler.response_serializer)


def _reading_generator(behavior: Callable[..., Any]) -> Callable[..., AsyncIterator[Any]]:
    async def reading(requests: AsyncIterator[Any], context: Context) -> AsyncIterator[Any]:
        generator = behavior(await _only(requests), context)
        async with contextlib.aclosing(generator) as responses:
            async for response in responses:
                yield response

    return reading


def _reading_coroutine(behavior: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    async def reading(requests: AsyncIterator[Any], context: Context) -> Any:
        return await behavior(await _only(requests), context)

    return reading


async def _only(requests: AsyncIterator[Any]) -> Any:
    try:
        async with asyncio.timeout(_FIRST_MESSAGE_S):
            request = await anext(aiter(requests), None)
    except TimeoutError:
        raise InvalidRequestError(
            f"the request message did not come within {_FIRST_MESSAGE_S:g} s"
        ) from None
    if request is None:
        raise InvalidRequestError("the request message is missing")
    return request


def parts(handler: Handler) -> tuple[Callable[..., Handler], Callable[..., Any]]:
    """Answer the function that makes such a handler, and what it calls."""
    kind = "_".join(
        "stream" if streaming else "unary"
        for streaming in (handler.request_streaming, handler.response_streaming)
    )
    make: Callable[..., Handler] = getattr(grpc, f"{kind}_rpc_method_handler")
    return make, getattr(handler, kind)


def service_of(method: str) -> str:
    """`/package.Service/Method` → `package.Service`, and nothing cleverer."""
    return method.rpartition("/")[0].removeprefix("/")
