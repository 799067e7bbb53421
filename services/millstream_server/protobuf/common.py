"""Conversion of what requests and workers of several abilities have.

What a message has that can't be read raises `InvalidRequestError`, with its field.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Coroutine
from importlib.metadata import version
from typing import Any, Generic, TypeVar

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from millstream.v1 import generation_pb2, processor_pb2, worker_pb2
from millstream_server.control.engine import EngineInfo, Role, WorkerDescription
from millstream_server.runtime.drain import OpenWork
from millstream_server.runtime.errors import InvalidRequestError
from millstream_server.runtime.priority import Priority
from millstream_server.runtime.rpc.slot_session import (
    CancelSlot,
    EndT,
    EntryT,
    Output,
    RequestT,
    ResponseT,
    SlotContent,
    StartSlot,
)
from millstream_server.runtime.telemetry.trace_context import NOT_TRACED, TraceContext

PRIORITIES = {
    processor_pb2.REQUEST_PRIORITY_UNSPECIFIED: Priority.NORMAL,
    processor_pb2.REQUEST_PRIORITY_LOW: Priority.LOW,
    processor_pb2.REQUEST_PRIORITY_NORMAL: Priority.NORMAL,
    processor_pb2.REQUEST_PRIORITY_HIGH: Priority.HIGH,
}
PRIORITIES_TO_PROTO = {
    Priority.LOW: processor_pb2.REQUEST_PRIORITY_LOW,
    Priority.NORMAL: processor_pb2.REQUEST_PRIORITY_NORMAL,
    Priority.HIGH: processor_pb2.REQUEST_PRIORITY_HIGH,
}
_MAX_TIMEOUT_S = 10 * 365 * 86_400
"""Ten years. A longer timeout is cut to it: it could not be written again after this hop."""
_MAX_TRACEPARENT, _MAX_TRACESTATE, _MAX_BAGGAGE = 128, 4096, 8192
"""Characters. W3C: 55 so far, at least 512 that must be passed on, at most 8192 bytes."""
CONTRACT_VERSION = "1.3"
"""MAJOR.MINOR; raise MINOR with every release that adds to the contract."""
ROLES_TO_PROTO = {role: worker_pb2.WorkerRole.Value(f"WORKER_ROLE_{role.name}") for role in Role}
Names = tuple[str, ...]
KeyT = TypeVar("KeyT")
ValueT = TypeVar("ValueT")


def same_fields(message: type[Message], plain: type[Any], *, optional: bool = False) -> Names:
    """Return the names of numbers, flags, texts and bytes that both have, as they are.

    ``optional``: those that may be absent from the message, which are None in the plain type; else
    those that are always there. Enums, lists and messages need a conversion and aren't among them.
    """
    names = {field.name for field in dataclasses.fields(plain)}
    return tuple(
        field.name
        for field in message.DESCRIPTOR.fields
        if field.name in names
        and field.has_presence is optional
        and not field.is_repeated
        and field.cpp_type not in (field.CPPTYPE_ENUM, field.CPPTYPE_MESSAGE)
    )


def values(source: Any, names: Names) -> dict[str, Any]:
    """Return these fields of a message or of a plain type."""
    return {name: getattr(source, name) for name in names}


ENGINE_FIELDS = same_fields(worker_pb2.WorkerInfo, EngineInfo)


def known(field: str, values: dict[KeyT, ValueT], value: Any) -> ValueT:
    """Look an enum's value up."""
    found = values.get(value)
    if found is None:
        raise InvalidRequestError.of(field, f"{value} is not a value that this server knows")
    return found


def control_of(
    message: Any, convert: Callable[[Any, TraceContext], RequestT]
) -> StartSlot[RequestT] | CancelSlot:
    """Read a slot stream's message, whose oneof `control` is `start` or `cancel`."""
    match message.WhichOneof("control"):
        case "start":
            start = message.start
            return StartSlot(start.slot, lambda trace: convert(start, trace))
        case "cancel":
            return CancelSlot(message.cancel.slot)
        case _:
            raise InvalidRequestError.of("control", "set one of start, cancel")


@dataclasses.dataclass(slots=True)
class SlotCalls(Generic[RequestT, EntryT, EndT, ResponseT]):
    """A `SlotService` whose messages only start and cancel requests."""

    work: OpenWork
    streams: OpenWork
    run: Callable[[RequestT, Output[EntryT]], Coroutine[Any, Any, EndT]]
    read: Callable[[Any, TraceContext], RequestT]
    response: Callable[[SlotContent[EntryT, EndT]], ResponseT]

    def control(self, message: Any) -> StartSlot[RequestT] | CancelSlot:
        return control_of(message, self.read)


def optional(message: Any, field: str) -> Any:
    """Return an optional field's value; None if it isn't set."""
    return getattr(message, field) if message.HasField(field) else None


def write_common(message: Any, request: Any) -> None:
    """Write what `read_common` reads into a start."""
    message.model = request.model
    message.request_id = request.request_id
    message.priority = PRIORITIES_TO_PROTO[request.priority]
    write_trace(message.trace, request.trace)
    if request.deadline_s is not None:
        left_s = max(0.0, request.deadline_s - time.monotonic())
        message.timeout.FromNanoseconds(int(left_s * 1e9))


def read_common(message: Any, stream: TraceContext) -> dict[str, Any]:
    """Read the fields that starts of several abilities have; ``stream`` is the stream's trace."""
    return {
        "model": message.model,
        "request_id": message.request_id,
        "priority": known("priority", PRIORITIES, message.priority),
        "trace": trace_of(message, stream),
        "deadline_s": deadline_of(message),
    }


def write_trace(message: generation_pb2.TraceContext, trace: TraceContext) -> None:
    """Write a trace context into an empty message; of an untraced request nothing is written."""
    if trace is not NOT_TRACED and trace != NOT_TRACED:  # also baggage without a traceparent
        message.traceparent = trace.traceparent
        message.tracestate = trace.tracestate
        message.baggage = trace.baggage


def trace_of(message: Any, stream: TraceContext) -> TraceContext:
    """Return a start's own trace context, else the stream's."""
    if not message.HasField("trace") or not message.trace.traceparent:
        return stream
    return context_of(message.trace)


def context_of(message: generation_pb2.TraceContext) -> TraceContext:
    """Convert a trace context; without parts that are too long, since a request waits with them."""
    if len(message.traceparent) > _MAX_TRACEPARENT:
        return NOT_TRACED
    fits_state = len(message.tracestate) <= _MAX_TRACESTATE
    fits_baggage = len(message.baggage) <= _MAX_BAGGAGE
    return TraceContext(
        message.traceparent,
        message.tracestate if fits_state else "",
        message.baggage if fits_baggage else "",
    )


def deadline_of(message: Any) -> float | None:
    """Return a start's deadline, on the clock of `time.monotonic`; None: it has none."""
    if not message.HasField("timeout"):
        return None
    return time.monotonic() + min(seconds(message.timeout), _MAX_TIMEOUT_S)


def duration(seconds: float) -> Duration:
    """Convert a duration."""
    message = Duration()
    message.FromNanoseconds(int(seconds * 1e9))
    return message


def seconds(message: Duration) -> float:
    """Return a duration in seconds."""
    return message.ToNanoseconds() / 1e9


def info_to_proto(description: WorkerDescription) -> worker_pb2.WorkerInfo:
    """Convert the fields that every worker has."""
    engine = description.engine
    return worker_pb2.WorkerInfo(
        worker_id=description.worker_id,
        role=ROLES_TO_PROTO[description.role],
        model=description.model,
        millstream_version=version("millstream"),
        contract_version=CONTRACT_VERSION,
        **values(engine, ENGINE_FIELDS),
    )
