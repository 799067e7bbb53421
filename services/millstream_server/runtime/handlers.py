"""RPC handlers, and what stands around them."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from millstream_server.runtime.errors import InvalidRequestError

# The generic forms exist in the stubs only, never at run time.
Context = Any
Handler = Any

_FIRST_MESSAGE_S = 30.0


class Layer(Protocol):
    """Something around the handlers of RPCs: `RpcInterceptor` enters it for each call.

    It sees streams of requests only: a method of one message is one that reads a stream's only one.
    """

    def covers(self, method: str) -> bool:
        """Whether it is to be entered for `/package.Service/Method`; asked once a method."""

    def around(
        self, requests: AsyncIterator[Any], context: Context
    ) -> AbstractContextManager[tuple[AsyncIterator[Any], Context]]:
        """Answer what to enter; it yields the requests and the context to go on with.

        It is left when the handler has ended, for whatever reason: a stream's when the stream has.
        """


def behavior(handler: Handler) -> Callable[..., Any]:
    """Answer what a handler calls."""
    return getattr(  # type: ignore[no-any-return]
        handler,
        "_".join(
            "stream" if streaming else "unary"
            for streaming in (handler.request_streaming, handler.response_streaming)
        ),
    )


def is_generator(handler: Handler) -> bool:
    """Tell a handler that yields its answers from one that returns or writes them."""
    return inspect.isasyncgenfunction(behavior(handler))


async def only(requests: AsyncIterator[Any]) -> Any:
    """Read the one message of a call.

    grpc.aio would read it before anything else: a caller who sends none would hold his RPC open for
    ever, uncounted and before he is asked who he is; one who closes without a message would never
    get a status.

    Raises:
        InvalidRequestError: there is none, or none in time.
    """
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


def service_of(method: str) -> str:
    """`/package.Service/Method` → `package.Service`, and nothing cleverer."""
    return method.rpartition("/")[0].removeprefix("/")
