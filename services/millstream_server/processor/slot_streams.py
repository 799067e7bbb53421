"""Serves a client's slot stream, of any forwarded service."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from millstream_server.processor.convert import new_request_id
from millstream_server.processor.front import Front
from millstream_server.protobuf.common import control_of
from millstream_server.runtime.drain import OpenWork
from millstream_server.runtime.errors import UnavailableError
from millstream_server.runtime.rpc.call import Call
from millstream_server.runtime.rpc.slot_session import (
    CancelSlot,
    Output,
    Response,
    SlotSession,
    StartSlot,
)
from millstream_server.runtime.telemetry.trace_context import NOT_TRACED, TraceContext, incoming

ResponseT = TypeVar("ResponseT", bound=Response)
RequestT = TypeVar("RequestT")
EntryT = TypeVar("EntryT")
EndT = TypeVar("EndT")
MessageT = TypeVar("MessageT")

_HALF_CLOSE_S = 1.0
"""How long a client that was told of the shutdown may send further requests."""


@dataclass(frozen=True, slots=True)
class Served(Generic[RequestT, EntryT, EndT, ResponseT]):
    """How the requests of one RPC are read, run and answered."""

    from_proto: Callable[[Any, TraceContext], RequestT]
    """Converts a `start`, in the trace that it comes with."""
    run: Callable[[RequestT, Output[EntryT]], Coroutine[Any, Any, EndT]]
    to_proto: Callable[[Any], ResponseT]
    """Converts entries and ends."""


async def serve(
    front: Front,
    served: Served[Any, Any, Any, ResponseT],
    requests: AsyncIterator[Any],
    call: Call,
) -> AsyncGenerator[ResponseT, None]:
    """Run one stream's requests; yield what is sent back.

    Raises:
        UnavailableError: this Processor is shutting down.
    """
    with front.call():
        messages = _ClientMessages(requests, front.work)
        session = SlotSession(_Stream(front.work, served, call))
        async with contextlib.aclosing(session.responses(messages.read())) as responses:
            async for response in responses:
                yield response
        messages.check()


class _Stream:
    """The `SlotService` of one stream."""

    def __init__(self, work: OpenWork, served: Served[Any, Any, Any, Any], call: Call) -> None:
        self.work = work
        self.streams = OpenWork()  # `serve` counts the stream
        self.run = served.run
        self.response = served.to_proto
        self._from_proto = served.from_proto
        self._call = call

    def control(self, message: Any) -> StartSlot[Any] | CancelSlot:
        return _control(message, self._call, self._from_proto)


def _control(
    message: Any,
    call: Call,
    convert: Callable[[Any, TraceContext], Any],
) -> StartSlot[Any] | CancelSlot:
    """Read a message whose oneof is `start` or `cancel`.

    The request gets an id if its client sent none, and the RPC's deadline if that is sooner.

    Raises:
        InvalidRequestError: it is neither.
    """
    left_s = call.time_left_s
    rpc_deadline_s = None if left_s is None else time.monotonic() + left_s

    def read(start: Any, trace: TraceContext) -> Any:
        request = convert(start, trace_of(call, trace))
        deadlines = [s for s in (request.deadline_s, rpc_deadline_s) if s is not None]
        return replace(
            request,
            request_id=request.request_id or new_request_id(),
            deadline_s=min(deadlines, default=None),
        )

    return control_of(message, read)


def trace_of(call: Call, current: TraceContext) -> TraceContext:
    """Return the ``current`` trace or, without tracing in this process, the caller's own."""
    return incoming(call.metadata) if current == NOT_TRACED else current


class _ClientMessages(Generic[MessageT]):
    """Reads on for a second after a shutdown was announced; requests read by then still run.

    A worker would wait until its callers close their streams. A client may never do it.
    """

    def __init__(self, messages: AsyncIterator[MessageT], work: OpenWork) -> None:
        self._messages = messages
        self._work = work
        self._until_s: float | None = None
        self._timeout: asyncio.Timeout | None = None
        self._cut = False

    def check(self) -> None:
        """Check that the client closed its side itself; call it when all requests have ended.

        Raises:
            UnavailableError: reading was ended by the shutdown.
        """
        if self._cut:
            raise UnavailableError(
                "this server is shutting down; continue on another one", retry_delay_s=0.1
            )

    async def read(self) -> AsyncIterator[MessageT]:
        with self._told():
            while (message := await self._next()) is not None:
                yield message

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        undo = self._work.when_leaving(self._leave)
        try:
            yield
        finally:
            undo()

    def _leave(self) -> None:
        self._until_s = asyncio.get_running_loop().time() + _HALF_CLOSE_S
        if self._timeout is not None:
            self._timeout.reschedule(self._until_s)

    async def _next(self) -> MessageT | None:
        try:
            async with asyncio.timeout_at(self._until_s) as self._timeout:
                return await anext(self._messages, None)
        except TimeoutError:
            self._cut = True
            return None
        finally:
            self._timeout = None
