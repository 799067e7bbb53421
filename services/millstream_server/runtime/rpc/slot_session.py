"""A slot stream whose requests are coroutines with entries and an end; of any ability.

A request runs in a task of its own, so it also waits for a slow reader without an effect on the
others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from millstream_server.runtime.errors import OverloadedError, ServingError, UnavailableError
from millstream_server.runtime.lifecycle.drain import OpenWork
from millstream_server.runtime.rpc.slot_output import (
    EndT,
    EntryT,
    Response,
    ResponseT,
    SlotContent,
    SlotOutput,
)
from millstream_server.runtime.rpc.slots import MAX_SLOT, MessageT, Slot, Slots, internal
from millstream_server.runtime.telemetry.trace_context import TraceContext

__all__ = [
    "MAX_SLOT",
    "CancelSlot",
    "Output",
    "RequestT",
    "Response",
    "SlotService",
    "SlotSession",
    "StartSlot",
    "TellSlot",
]

_MAX_OPEN_SLOTS = 4096
_STALL_LIMIT_S = 60.0


class SlotRequest(Protocol):
    """What a session reads of a request."""

    @property
    def deadline_s(self) -> float | None:
        """When it has to have ended, on the clock of `time.monotonic`; None: never."""
        ...


MessageT_contra = TypeVar("MessageT_contra", contravariant=True)
ResponseT_co = TypeVar("ResponseT_co", covariant=True, bound=Response)
EntryT_contra = TypeVar("EntryT_contra", contravariant=True)
RequestT = TypeVar("RequestT", bound=SlotRequest)


@dataclass(frozen=True, slots=True)
class StartSlot(Generic[RequestT]):
    """A message that starts a request."""

    slot: int
    read: Callable[[TraceContext], RequestT]
    """Converts the request, given the trace context of one that has none of its own. If it raises a
    `ServingError`, the request fails with it."""


@dataclass(frozen=True, slots=True)
class TellSlot(Generic[RequestT]):
    """A message to a running request; without effect if it has ended."""

    slot: int
    tell: Callable[[RequestT], None]
    """If it raises a `ServingError`, the request ends with it."""


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
        """Send ``entry``, unless a newer one or the end replaces it before that; never waits."""
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

    def control(
        self, message: MessageT_contra
    ) -> StartSlot[RequestT] | TellSlot[RequestT] | CancelSlot | None:
        """Say what a message asks for; None: nothing of a slot.

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


class SlotSession(
    Slots[MessageT, StartSlot[RequestT], ResponseT],
    Generic[MessageT, RequestT, EntryT, EndT, ResponseT],
):
    """One stream of a `SlotService`; see `Slots`."""

    def __init__(
        self,
        service: SlotService[MessageT, RequestT, EntryT, EndT, ResponseT],
        *,
        stall_limit_s: float = _STALL_LIMIT_S,
    ) -> None:
        """Run requests with ``service``."""
        self.service = service
        self.output: SlotOutput[EntryT, EndT, ResponseT] = SlotOutput(
            service.response, stall_limit_s
        )
        super().__init__(service.work, service.streams, self.output)

    def _obey(self, message: MessageT) -> None:
        control = self.service.control(message)
        if isinstance(control, StartSlot):
            self._start(control.slot, control)
        elif isinstance(control, CancelSlot):
            self._cancel(control.slot)
        elif control is not None and isinstance(slot := self.open.get(control.slot), _Running):
            slot.tell(control)

    def _slot(self, number: int) -> _Running[RequestT, EntryT, EndT]:
        return _Running(self, number)

    def _check_accepts(self) -> None:
        super()._check_accepts()
        if len(self.open) > _MAX_OPEN_SLOTS:
            raise OverloadedError(
                f"{_MAX_OPEN_SLOTS} requests are open on this stream; wait for some to end",
                retry_delay_s=1.0,
            )


class _Running(
    Slot[SlotSession[Any, RequestT, EntryT, EndT, Any], StartSlot[RequestT]],
    Generic[RequestT, EntryT, EndT],
):
    """A slot whose request runs in a task; the request's `Output`."""

    __slots__ = ("_request", "_task")

    _request: RequestT | None
    _task: asyncio.Task[EndT] | None

    def start(self, start: StartSlot[RequestT]) -> None:
        request = self._request = start.read(self.session.trace)
        self.run_until(request.deadline_s)
        self._task = asyncio.create_task(self.session.service.run(request, self))
        self._task.add_done_callback(self._ended)

    def tell(self, message: TellSlot[RequestT]) -> None:
        assert self._request is not None  # noqa: S101 - it has started
        try:
            message.tell(self._request)
        except ServingError as error:
            # Its traceback knows this slot: a cycle would keep an upload's bytes.
            self.stop(error.with_traceback(None))

    def cancel(self) -> None:
        assert self._task is not None  # noqa: S101 - it has started
        self._task.cancel()

    def latest(self, entry: EntryT) -> None:
        self.session.output.latest(self.number, entry)

    async def put(self, entry: EntryT, nbytes: int) -> None:
        await self.session.output.put(self.number, entry, nbytes)

    def _ended(self, task: asyncio.Task[EndT]) -> None:
        """Report the end, once: the task has ended in whatever way."""
        # A failed task's traceback knows this slot: a cycle would keep an image's bytes.
        self._task = self._request = None
        if task.cancelled():
            stop = UnavailableError("the server stopped before the request's end")
            self.fail(self.stopped or stop)
        elif (error := task.exception()) is None:
            self.free()
            self.session.output.finish(self.number, task.result())
        elif isinstance(error, ServingError):
            self.fail(error)
        else:
            self.fail(internal("a request failed", error))
