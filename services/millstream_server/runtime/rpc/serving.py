"""Serves RPCs: layers, then servicer; the one place where a failure becomes a status.

It knows no transport: that hands it a `ServedCall`.
"""

from __future__ import annotations

import asyncio
import inspect
import traceback
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NoReturn, TypeAlias

from millstream_server.runtime.errors import (
    Code,
    Failure,
    InternalError,
    InvalidRequestError,
    ServingError,
    StatusError,
    UnknownMethodError,
)
from millstream_server.runtime.rpc.call import Layer, Outcome, Visit
from millstream_server.runtime.rpc.served_call import (
    CallOverError,
    OpenCalls,
    ServedCall,
    tolerant,
)
from millstream_server.runtime.telemetry.log import get_log
from millstream_server.runtime.telemetry.tracing import trace_id
from millstream_server.runtime.work.pool import CURRENT_KEY

log = get_log(__name__)

Handler = Any
"""grpc.RpcMethodHandler; its generic form exists in the stubs only."""

ServicerTable: TypeAlias = Any
"""What the generated `add_…Servicer_to_server` functions take: a grpc.aio server, or anything with
the two methods of `MethodTable` that they call."""

Refuse = Callable[[Failure], None]
"""Sends the status of a failure."""

_FIRST_MESSAGE_S = 30.0
_LONGEST_NAME = 200
_OK = Outcome(Code.OK)


class Method:
    """Serves every call of one method."""

    __slots__ = ("_layers", "_open", "_refusal", "_sends", "_servicer", "descriptor",
                 "first_message_s", "lone", "max_request_bytes", "name", "parse", "request_type",
                 "response_streaming", "serialize", "waits")  # fmt: skip

    def __init__(
        self, name: str, handler: Handler, layers: Sequence[Layer], open_calls: OpenCalls
    ) -> None:
        self.name = name
        sent = "stream" if handler.request_streaming else "unary"
        returned = "stream" if handler.response_streaming else "unary"
        self._servicer: Callable[..., Any] = getattr(handler, f"{sent}_{returned}")
        self.max_request_bytes: int | None = getattr(self._servicer, "max_request_bytes", None)
        """Its own limit on a request message; None: it has the server's."""
        self.parse: Callable[[bytes], Any] = tolerant(
            handler.request_deserializer, self.max_request_bytes
        )
        """Parses a request; returns the error of what can't be parsed."""
        self.request_type: Any = getattr(handler.request_deserializer, "__self__", None)
        """The class of its requests; None: they are bytes, or there is no such method."""
        self.descriptor: Any = getattr(self.request_type, "DESCRIPTOR", None)
        self.serialize: Callable[[Any], bytes] = handler.response_serializer or bytes
        self.response_streaming: bool = handler.response_streaming
        self._sends = handler.response_streaming and inspect.iscoroutinefunction(self._servicer)
        """Whether the servicer itself sends its responses, by the `Call`."""
        self._layers = layers
        self._open = open_calls
        self.lone = not handler.request_streaming
        """Whether a call has one request."""
        self.waits = self.lone or getattr(self._servicer, "after_first_message", False)
        """Whether its servicer has nothing to do before the first request."""
        self.first_message_s = _FIRST_MESSAGE_S if self.lone else None
        """Longest wait for the first request, if it isn't the server's to say."""

    def begin(self, call: ServedCall) -> None:
        """Begin a call: enter the layers. `serve` or `give_up` must follow, also after an error.

        Raises:
            ServingError: a layer refuses it; or another exception.
        """
        self._open.add(call)
        for layer in self._layers:
            visit = layer.enter(call)
            if visit is not None:
                call.visits.append(visit)
        CURRENT_KEY.set(call.caller_key)

    def give_up(self, call: ServedCall, error: BaseException, refuse: Refuse) -> None:
        """End a call that has begun and isn't served: ``refuse`` sends the status of ``error``.

        A `CancelledError` has none.
        """
        call.ending = True
        failed = _leave_layers(call.visits, error)
        if isinstance(failed, Exception):
            reported = _reported(failed)
            _log(call, failed, reported)
            refuse(reported)
            outcome = Outcome(reported.code, reported.message, failed)
        else:
            outcome = _cancelled(call)
        _report_outcome(call.visits, outcome)
        self._open.remove(call)

    async def serve(self, call: ServedCall, *, begun: bool = False) -> None:
        """Serve one call; a failure, wherever it is raised, ends it with a status.

        ``begun`` says that `begin` was called and raised nothing.

        Only failures after which no status can be sent are raised: the RPC was cancelled, or the
        process ends.
        """
        visits = call.visits
        try:
            try:
                if not begun:
                    self.begin(call)
                request = await _only(call) if self.lone else call
                if self._sends:
                    await self._servicer(request, call)
                elif self.response_streaming:
                    await self._send(request, call)
                else:
                    await call.write(await self._servicer(request, call))
            except BaseException as error:
                try:
                    sent = await _fail(call, visits, _leave_layers(visits, error))
                finally:
                    # A transport may keep the error until the next garbage collection, and with it
                    # what the handler had at hand: megabytes of an image.
                    traceback.clear_frames(error.__traceback__)
                if not sent:
                    raise
                return
            call.ending = True
            failed = _leave_layers(visits, None)
            if failed is not None and await _fail(call, visits, failed):
                return
            call.complete()
            _report_outcome(visits, _OK)
        finally:
            visits.clear()  # a transport may keep the call until the next garbage collection
            self._open.remove(call)

    async def _send(self, request: Any, call: ServedCall) -> None:
        responses = self._servicer(request, call)
        write = call.write
        try:
            async for response in responses:
                await write(response)
        except BaseException:
            # Closed here, not later by the garbage collector.
            await responses.aclose()
            raise


@dataclass(frozen=True, slots=True)
class Rpcs:
    """What all RPCs of a server share."""

    layers: Sequence[Layer] = ()
    """In this order, the first outermost."""
    services: Sequence[str] = ()
    """Named in the error of an unknown method."""
    open_calls: OpenCalls = field(default_factory=OpenCalls)
    """RPCs whose handlers run; a server that stops cuts and awaits them."""

    def method(self, name: str, handler: Handler | None) -> Method:
        """Make what serves a method; without a handler its calls end with UNIMPLEMENTED.

        Unknown methods pass through the layers too, so that unauthenticated callers can't find out
        which methods exist.
        """
        found = _Unknown(name, self.services) if handler is None else handler
        layers = [layer for layer in self.layers if layer.covers(name)]
        return Method(name, found, layers, self.open_calls)


class MethodTable:
    """Finds what serves a path. Servicers are added as to a grpc.aio server."""

    def __init__(self, rpcs: Rpcs) -> None:
        self._rpcs = rpcs
        self._handlers: dict[str, Handler] = {}
        self._generic: list[Any] = []
        self._methods: dict[str, Method] = {}

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Handler]) -> None:
        for name, handler in handlers.items():
            self._handlers[f"/{service}/{name}"] = handler

    def add_generic_rpc_handlers(self, handlers: Iterable[Any]) -> None:
        """Add `grpc.GenericRpcHandler`s, which are asked for methods that aren't registered."""
        self._generic += handlers

    def find(self, path: str) -> Method:
        """Return what serves the calls of a path; also for a method that isn't there."""
        method = self._methods.get(path)
        if method is not None:
            return method
        handler = self._handlers.get(path) or self._ask(path)
        method = self._rpcs.method(path, handler)
        if handler is not None:  # callers can invent any number of others
            self._methods[path] = method
        return method

    def serves(self, path: str) -> bool:
        """Whether there is a method at a path."""
        return path in self._handlers or self._ask(path) is not None

    def _ask(self, path: str) -> Handler | None:
        details = SimpleNamespace(method=path, invocation_metadata=())
        found = (handler.service(details) for handler in self._generic)
        return next((handler for handler in found if handler is not None), None)


class _Unknown:
    """The handler of a method that the server doesn't have; as a stream it fits every call."""

    request_streaming = True
    response_streaming = True
    request_deserializer = None
    response_serializer = None

    def __init__(self, name: str, services: Sequence[str]) -> None:
        served = f"; it serves {', '.join(services)}" if services else ""
        name = name.removeprefix("/")[:_LONGEST_NAME]
        self._message = f"this server has no method {name}{served}"

    async def stream_stream(self, _requests: object, _call: object) -> AsyncIterator[NoReturn]:
        raise UnknownMethodError(self._message)
        yield


async def _only(call: ServedCall) -> Any:
    """Read the one message of a call.

    Raises:
        StatusError: there is none.
        InvalidRequestError: there is none in time.
    """
    try:
        if call.has_request:
            return await anext(call)
        async with asyncio.timeout(_FIRST_MESSAGE_S):
            return await anext(call)
    except TimeoutError:
        raise no_first_message(_FIRST_MESSAGE_S) from None
    except StopAsyncIteration:
        # The code is that of gRPC's table (doc/statuscodes.md).
        raise StatusError(Code.UNIMPLEMENTED, "the request message is missing") from None


def no_first_message(limit_s: float) -> InvalidRequestError:
    """Make the error of an RPC whose first message doesn't come."""
    return InvalidRequestError(f"the request message did not come within {limit_s:g} s")


def _leave_layers(visits: Sequence[Visit], error: BaseException | None) -> BaseException | None:
    """Leave the layers, innermost first; return the failure, which a layer may replace."""
    for visit in reversed(visits):
        try:
            visit.leave()
        except Exception as failed:  # noqa: BLE001 - it becomes the status
            error = failed
    return error


async def _fail(call: ServedCall, visits: Sequence[Visit], error: BaseException | None) -> bool:
    """End the RPC with the status of ``error``; return False if none can be sent."""
    call.ending = True
    if isinstance(error, asyncio.CancelledError):
        # If neither holds, something the handler awaited was cancelled, and the caller still waits.
        failure = call.take_failure()
        if failure is None and call.was_cancelled():
            _report_outcome(visits, _cancelled(call))
            return False
        error = failure or error
    elif not isinstance(error, Exception):  # the process ends
        _report_outcome(visits, Outcome(Code.UNKNOWN))
        return False
    reported = _reported(error)
    # Either the caller has gone, or the transport was misused: the abort below shows which.
    late = call.is_late(error)
    if not late:
        _log(call, error, reported)
    try:
        await call.abort(reported)
    except CallOverError:
        log.debug("RPC ended before its status could be sent", method=call.method)
        _report_outcome(visits, _cancelled(call))
        raise asyncio.CancelledError from error
    if late:
        _log(call, error, reported)
    _report_outcome(visits, Outcome(reported.code, reported.message, error))
    return True


def _reported(error: BaseException | None) -> Failure:
    return error if isinstance(error, (ServingError, StatusError)) else InternalError.with_id()


def _cancelled(call: ServedCall) -> Outcome:
    if call.time_left_s == 0:
        return Outcome(Code.DEADLINE_EXCEEDED, "the caller's deadline passed")
    return Outcome(Code.CANCELLED, "cancelled by the client")


def _report_outcome(visits: Sequence[Visit], outcome: Outcome) -> None:
    for visit in visits:
        visit.ended(outcome)


def _log(call: ServedCall, error: BaseException, reported: Failure) -> None:
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
