"""A slot stream whose requests are coroutines with entries and an end; of any ability.

A request runs in a task of its own, so it also waits for a slow reader without an effect on the
others. What they send is collected, and taken by one writer.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from millstream_server.runtime.drain import OpenWork
from millstream_server.runtime.errors import OverloadedError, ServingError, UnavailableError
from millstream_server.runtime.rpc.slots import MessageT, Outgoing, Slot, Slots, internal
from millstream_server.runtime.telemetry.trace_context import TraceContext

_MAX_OPEN_SLOTS = 4096
_STALL_LIMIT_S = 60.0


class Response(Protocol):
    """What is read of a message that is sent."""

    def ByteSize(self) -> int:  # noqa: N802 - protobuf's name
        """Return its size on the wire."""
        ...


EntryT = TypeVar("EntryT")
EndT = TypeVar("EndT")
ResponseT = TypeVar("ResponseT", bound=Response)

_MESSAGE_BYTES = 1 << 20
"""A message is full when its entries have so many bytes."""
_MAX_MESSAGE_BYTES = 3 << 20
"""gRPC's callers take 4 MiB unless they say otherwise; one entry has little more than 1 MiB."""
_PENDING_BYTES = 2 << 20
"""While more is waiting to be sent, requests with further entries wait."""
_PENDING_ITEMS = 4096
"""While more entries are waiting to be sent, no further message of the caller is read."""


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


@dataclass(frozen=True, slots=True)
class SlotContent(Generic[EntryT, EndT]):
    """What one message has, per slot, in order; `latest` and `entries` come before the ends."""

    latest: Sequence[tuple[int, EntryT]]
    """Entries of which only the newest of a slot is of interest."""
    entries: Sequence[tuple[int, EntryT]]
    finished: Sequence[tuple[int, EndT]]
    errors: Sequence[tuple[int, ServingError]]
    draining: bool

    def halves(self) -> tuple[SlotContent[EntryT, EndT], SlotContent[EntryT, EndT]] | None:
        """Return two parts, to be sent in this order; None: there is only one thing in it."""
        parts: list[Sequence[Any]] = [self.latest, self.entries, self.finished, self.errors]
        room = sum(map(len, parts)) // 2
        if not room:
            return None
        first, second = [], []
        for part in parts:
            first.append(part[:room])
            second.append(part[room:])
            room = max(0, room - len(part))
        return (
            SlotContent(first[0], first[1], first[2], first[3], self.draining),
            SlotContent(second[0], second[1], second[2], second[3], draining=False),
        )


class SlotOutput(Outgoing[ResponseT], Generic[EntryT, EndT, ResponseT]):
    """Collects entries and ends."""

    def __init__(
        self, response: Callable[[SlotContent[EntryT, EndT]], ResponseT], stall_limit_s: float
    ) -> None:
        """Make messages by ``response``.

        A request fails whose entry waits while nothing is taken for ``stall_limit_s``.
        """
        super().__init__()
        self._response = response
        self._stall_limit_s = stall_limit_s
        self._latest: dict[int, EntryT] = {}
        self._items: deque[tuple[str, int, Any, int]] = deque()
        """Kind, slot, content and bytes of each."""
        self._bytes = 0
        self._taken_at = time.monotonic()
        self._turn = asyncio.Lock()

    @property
    def crowded(self) -> bool:
        return len(self._items) > _PENDING_ITEMS

    def latest(self, slot: int, entry: EntryT) -> None:
        """Add an entry; it replaces the slot's last such entry, if that was not taken yet."""
        self._latest[slot] = entry
        self._fill()

    async def put(self, slot: int, entry: EntryT, nbytes: int) -> None:
        """Add an entry of ``nbytes``; wait first while too much is waiting to be sent.

        Those who wait go on in the order in which they came.

        Raises:
            UnavailableError: the caller takes nothing.
        """
        began = time.monotonic()
        async with self._turn:
            while self._bytes > _PENDING_BYTES:
                left_s = max(began, self._taken_at) + self._stall_limit_s - time.monotonic()
                try:
                    async with asyncio.timeout(left_s):
                        await self.taken()
                except TimeoutError:
                    raise UnavailableError(
                        f"the caller read nothing for {self._stall_limit_s:g} s; read the stream "
                        "and send the request again"
                    ) from None
        self._add("entry", slot, entry, nbytes)

    def finish(self, slot: int, end: EndT) -> None:
        """Add a slot's good end; a latest entry that was not taken is dropped."""
        self._latest.pop(slot, None)
        self._add("finish", slot, end, 64)

    def fail(self, slot: int, error: ServingError) -> None:
        """Add a slot's failure; a latest entry that was not taken is dropped."""
        self._latest.pop(slot, None)
        self._add("error", slot, error, 256)

    def take(self) -> Iterator[ResponseT]:
        """Make the next message, or several: one that is too large would end the caller's stream.

        Only the message itself tells its size; that of errors and previews isn't known before.
        """
        latest, self._latest = list(self._latest.items()), {}
        found: dict[str, list[Any]] = {"entry": [], "finish": [], "error": []}
        nbytes = 0
        while self._items and nbytes < _MESSAGE_BYTES:
            kind, slot, content, size = self._items.popleft()
            nbytes += size
            found[kind].append((slot, content))
        self._bytes -= nbytes
        self._taken_at = time.monotonic()
        content = SlotContent(
            latest, found["entry"], found["finish"], found["error"], self._draining
        )
        self._empty(rest=bool(self._items))
        return self._messages(content)

    def _messages(self, content: SlotContent[EntryT, EndT]) -> Iterator[ResponseT]:
        response = self._response(content)
        if response.ByteSize() <= _MAX_MESSAGE_BYTES or (halves := content.halves()) is None:
            yield response
            return
        for half in halves:
            yield from self._messages(half)

    def _add(self, kind: str, slot: int, content: Any, nbytes: int) -> None:
        self._items.append((kind, slot, content, nbytes))
        self._bytes += nbytes
        self._fill()


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
