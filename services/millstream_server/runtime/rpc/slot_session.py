"""The server's side of a stream that carries many requests, each in a slot; of any ability.

A request ends in exactly one terminal entry: its good end or an error. It runs in a task of its
own, so it fails, is cancelled and waits for a slow reader without an effect on the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from millstream_server.runtime.errors import (
    DeadlinePassedError,
    InternalError,
    InvalidRequestError,
    OverloadedError,
    RequestCancelledError,
    ServingError,
    UnavailableError,
    WorkerDrainingError,
)
from millstream_server.runtime.lifecycle.drain import OpenWork
from millstream_server.runtime.rpc.slot_output import EndT, EntryT, SlotContent, SlotOutput
from millstream_server.runtime.telemetry.log import get_log
from millstream_server.runtime.telemetry.trace_context import TraceContext
from millstream_server.runtime.telemetry.tracing import ambient

log = get_log(__name__)

MAX_SLOT = 1 << 20
_MAX_OPEN_SLOTS = 4096
_STALL_LIMIT_S = 60.0
_MAX_MESSAGE_BYTES = 3 << 20
"""gRPC's callers take 4 MiB unless they say otherwise; one entry has little more than 1 MiB."""


class SlotRequest(Protocol):
    """What a session reads of a request."""

    @property
    def deadline_s(self) -> float | None:
        """When it has to have ended, on the clock of `time.monotonic`; None: never."""
        ...


class Response(Protocol):
    """What a session reads of a message that it sends."""

    def ByteSize(self) -> int:  # noqa: N802 - protobuf's name
        """Return its size on the wire."""
        ...


MessageT_contra = TypeVar("MessageT_contra", contravariant=True)
ResponseT_co = TypeVar("ResponseT_co", covariant=True, bound=Response)
EntryT_contra = TypeVar("EntryT_contra", contravariant=True)
MessageT = TypeVar("MessageT")
ResponseT = TypeVar("ResponseT", bound=Response)
RequestT = TypeVar("RequestT", bound=SlotRequest)


@dataclass(frozen=True, slots=True)
class StartSlot(Generic[RequestT]):
    """A message that starts a request."""

    slot: int
    read: Callable[[TraceContext], RequestT]
    """Converts the request, given the trace context of one that has none of its own. If it raises a
    `ServingError`, the request fails with it."""


@dataclass(frozen=True, slots=True)
class CancelSlot:
    """A message that stops a request."""

    slot: int


class Output(Protocol[EntryT_contra]):
    """Where a running request puts what it has to send."""

    @property
    def stopped(self) -> ServingError | None:
        """Why the session cancels the request, for its telemetry; None: it doesn't."""
        ...

    def latest(self, entry: EntryT_contra) -> None:
        """Send ``entry``, unless a newer one replaces it before that; never waits."""
        ...

    async def put(self, entry: EntryT_contra, nbytes: int) -> None:
        """Send ``entry``, which has about ``nbytes``; wait while the caller reads too slowly.

        Raises:
            UnavailableError: the caller reads nothing.
        """
        ...


class SlotService(Protocol[MessageT_contra, RequestT, EntryT, EndT, ResponseT_co]):
    """What an ability provides for its streams."""

    work: OpenWork
    """Counts open requests; knows whether the process drains."""
    streams: OpenWork
    """Counts streams; a drain waits until those notified of it have ended."""

    def control(self, message: MessageT_contra) -> StartSlot[RequestT] | CancelSlot:
        """Say what a message asks for.

        Raises:
            InvalidRequestError: it can't be said; this ends the stream.
        """
        ...

    async def run(self, request: RequestT, output: Output[EntryT]) -> EndT:
        """Run a request; it is cancelled to stop it.

        Raises:
            ServingError: it failed.
        """
        ...

    def response(self, content: SlotContent[EntryT, EndT]) -> ResponseT_co:
        """Make a message."""
        ...


class _SlotOutput(Generic[EntryT, EndT]):
    """One slot's `Output`."""

    def __init__(self, outputs: SlotOutput[EntryT, EndT], slot: int) -> None:
        self._outputs = outputs
        self._slot = slot
        self.stopped: ServingError | None = None

    def latest(self, entry: EntryT) -> None:
        self._outputs.latest(self._slot, entry)

    async def put(self, entry: EntryT, nbytes: int) -> None:
        await self._outputs.put(self._slot, entry, nbytes)


class _Slot(Generic[EndT]):
    """A slot in use."""

    def __init__(self, task: asyncio.Task[EndT], output: _SlotOutput[Any, EndT]) -> None:
        self.task = task
        self.output = output
        self.deadline: asyncio.TimerHandle | None = None

    def stop(self, error: ServingError) -> None:
        """End the request with ``error``, unless it ends before."""
        if self.output.stopped is None:
            self.output.stopped = error
            self.task.cancel()


class SlotSession(Generic[MessageT, RequestT, EntryT, EndT, ResponseT]):
    """One stream's requests; for one stream only.

    A servicer uses it as: ``async with aclosing(session.responses(requests)) as responses``, and
    yields each; the closing stops the requests of a caller that went away.
    """

    def __init__(
        self,
        service: SlotService[MessageT, RequestT, EntryT, EndT, ResponseT],
        *,
        stall_limit_s: float = _STALL_LIMIT_S,
    ) -> None:
        """Run requests with ``service``."""
        self._service = service
        self._output: SlotOutput[EntryT, EndT] = SlotOutput(stall_limit_s)
        self._opened_in_drain = service.work.leaving
        self._trace = ambient()
        self._slots: dict[int, _Slot[EndT]] = {}
        self._abandoned = False

    async def responses(self, messages: AsyncIterator[MessageT]) -> AsyncGenerator[ResponseT, None]:
        """Process the caller's messages; yield responses until every request has ended.

        Raises:
            InvalidRequestError: the caller broke the stream's rules, such as using a slot twice; it
            ends the stream and every request on it.
        """
        with self._reading(messages) as reader:
            while True:
                if self._output.filled:
                    for response in self._messages(self._output.take()):
                        yield response
                elif reader.done() and not self._slots:
                    reader.result()
                    return
                elif reader.done() and reader.exception() is not None:
                    reader.result()
                else:
                    self._output.wake.clear()
                    await self._output.wake.wait()

    def _messages(self, content: SlotContent[EntryT, EndT]) -> Iterator[ResponseT]:
        """Make a message, or several: one that is too large would end the caller's stream.

        Only the message itself tells its size; that of errors and previews isn't known before.
        """
        response = self._service.response(content)
        if response.ByteSize() <= _MAX_MESSAGE_BYTES or (halves := content.halves()) is None:
            yield response
            return
        for half in halves:
            yield from self._messages(half)

    @contextlib.contextmanager
    def _reading(self, messages: AsyncIterator[MessageT]) -> Iterator[asyncio.Task[None]]:
        reader = asyncio.create_task(self._read(messages))
        reader.add_done_callback(lambda _: self._output.wake.set())
        undo = self._service.work.when_leaving(self._output.drain)
        try:
            with self._service.streams.track():
                yield reader
        finally:
            undo()
            reader.cancel()
            self._abandoned = True
            for slot in list(self._slots.values()):
                slot.stop(RequestCancelledError("the caller's stream ended"))

    async def _read(self, messages: AsyncIterator[MessageT]) -> None:
        async for message in messages:
            control = self._service.control(message)
            if isinstance(control, StartSlot):
                self._start(control)
            elif slot := self._slots.get(control.slot):
                slot.stop(RequestCancelledError("the caller cancelled the request"))
            await self._output.short()

    def _start(self, start: StartSlot[RequestT]) -> None:
        number = start.slot
        if number >= MAX_SLOT or number in self._slots:
            why = "is in use" if number in self._slots else f"must be below {MAX_SLOT}"
            raise InvalidRequestError.of("start.slot", f"{number} {why}")
        try:
            self._check()
            request = start.read(self._trace)
            left_s = _left_s(request)
        except ServingError as error:
            self._output.fail(number, error)
            return
        except Exception as error:  # noqa: BLE001 - one request's bug must not end the others
            self._output.fail(number, _internal(error))
            return
        output = _SlotOutput(self._output, number)
        task = asyncio.create_task(self._run(request, output))
        slot = self._slots[number] = _Slot(task, output)
        if left_s is not None:
            passed = DeadlinePassedError("the deadline passed before the request had ended")
            slot.deadline = asyncio.get_running_loop().call_later(left_s, slot.stop, passed)
        task.add_done_callback(lambda _: self._ended(number, slot))

    async def _run(self, request: RequestT, output: _SlotOutput[EntryT, EndT]) -> EndT:
        return await self._service.run(request, output)

    def _check(self) -> None:
        if self._opened_in_drain and self._service.work.refusing:
            raise WorkerDrainingError(
                "this server is shutting down; retry on another one", retry_delay_s=0.1
            )
        self._service.work.check_in_service()
        if len(self._slots) >= _MAX_OPEN_SLOTS:
            raise OverloadedError(
                f"{_MAX_OPEN_SLOTS} requests are open on this stream; wait for some to end",
                retry_delay_s=1.0,
            )

    def _ended(self, number: int, slot: _Slot[EndT]) -> None:
        """Report the end, once: the task has ended in whatever way."""
        del self._slots[number]
        if slot.deadline is not None:
            slot.deadline.cancel()
        error = _error(slot)
        if self._abandoned:
            return
        if error is None:
            self._output.finish(number, slot.task.result())
        else:
            self._output.fail(number, error)


def _left_s(request: SlotRequest) -> float | None:
    if request.deadline_s is None:
        return None
    left_s = request.deadline_s - time.monotonic()
    if left_s <= 0:
        raise DeadlinePassedError("the deadline passed before the request arrived")
    return left_s


def _error(slot: _Slot[EndT]) -> ServingError | None:
    """Return why a request failed; None if it ended well."""
    if slot.task.cancelled():
        return slot.output.stopped or UnavailableError(
            "the server stopped before the request's end"
        )
    error = slot.task.exception()
    if error is None or isinstance(error, ServingError):
        return error
    return _internal(error)


def _internal(error: BaseException) -> InternalError:
    internal = InternalError.with_id()
    log.error("a request failed", error_id=internal.error_id, error=error)
    return internal
