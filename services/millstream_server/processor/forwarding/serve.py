"""Serves a client's slot stream, of any forwarded service."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import replace
from typing import Any, TypeVar

from millstream_server.processor.convert import new_request_id
from millstream_server.processor.core import ProcessorCore
from millstream_server.processor.forwarding.client_messages import ClientMessages
from millstream_server.protobuf.common import control_of
from millstream_server.runtime.rpc.call import Call
from millstream_server.runtime.rpc.slot_session import (
    CancelSlot,
    Response,
    SlotService,
    SlotSession,
    StartSlot,
)
from millstream_server.runtime.telemetry.trace_context import NOT_TRACED, TraceContext
from millstream_server.runtime.telemetry.tracing import incoming

ResponseT = TypeVar("ResponseT", bound=Response)


async def serve(
    core: ProcessorCore,
    service: SlotService[Any, Any, Any, Any, ResponseT],
    requests: AsyncIterator[Any],
) -> AsyncGenerator[ResponseT, None]:
    """Run one stream's requests; yield what is sent back.

    Raises:
        UnavailableError: this Processor is shutting down.
    """
    with core.call():
        messages = ClientMessages(requests, core.work)
        session = SlotSession(service)
        async with contextlib.aclosing(session.responses(messages.read())) as responses:
            async for response in responses:
                yield response
        messages.check()


def control(
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
