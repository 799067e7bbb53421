"""The server's side of a stream that carries many requests, each in a slot, of any ability.

A request ends in exactly one terminal entry: its good end or an error. It fails and is cancelled
without an effect on the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator
from typing import Any, ClassVar, Generic, TypeVar

from millstream_server.runtime.drain import OpenWork
from millstream_server.runtime.errors import (
    DeadlinePassedError,
    InternalError,
    InvalidRequestError,
    RequestCancelledError,
    ServingError,
    WorkerDrainingError,
)
from millstream_server.runtime.telemetry.log import get_log
from millstream_server.runtime.telemetry.tracing import ambient

log = get_log(__name__)

MAX_SLOT = 1 << 20
_CONTROLS_AT_ONCE = 64
"""A start costs some 0.2 ms; other streams wait so long."""

MessageT = TypeVar("MessageT")
ResponseT = TypeVar("ResponseT")
StartT = TypeVar("StartT")
SessionT = TypeVar("SessionT", bound="Slots[Any, Any, Any]")


class Outgoing(ABC, Generic[ResponseT]):
    """What a stream has to send: requests add it, and it is taken when the call can be written."""

    __slots__ = ("_draining", "_taken", "filled", "wake")

    def __init__(self) -> None:
        self.filled = False
        """Whether there is something to take."""
        self.wake = asyncio.Event()
        """Set when there is."""
        self._draining = False
        self._taken = asyncio.Event()

    @property
    @abstractmethod
    def crowded(self) -> bool:
        """Whether so much waits to be sent that no further control of the caller is obeyed."""

    @abstractmethod
    def take(self) -> Iterable[ResponseT]:
        """Return the next message, or the next few."""

    @abstractmethod
    def fail(self, slot: int, error: ServingError) -> None:
        """Add a slot's failure."""

    def drain(self) -> None:
        self._draining = True
        self._fill()

    async def taken(self) -> None:
        self._taken.clear()
        await self._taken.wait()

    def _fill(self) -> None:
        self.filled = True
        self.wake.set()

    def _empty(self, *, rest: bool) -> None:
        """Note a `take`; ``rest``: something had no room in the message."""
        self.filled = rest
        self._draining = False
        self._taken.set()


class Slots(ABC, Generic[MessageT, StartT, ResponseT]):
    """One stream's requests; for one stream only. A subclass says what the stream carries.

    A servicer uses it as: ``async with aclosing(slots.responses(requests)) as responses``, and
    yields each; the closing stops the requests of a caller that went away.
    """

    server: ClassVar[str] = "server"
    """What the process is, in errors."""
    least_gap_s: ClassVar[float] = 0.0
    """Least time between two messages: what comes meanwhile leaves together."""

    def __init__(self, work: OpenWork, streams: OpenWork, output: Outgoing[ResponseT]) -> None:
        """Make it in the call's task: its trace is the parent of requests without their own.

        ``work`` counts open requests and knows whether the process drains; ``streams`` counts
        streams: a drain waits until those notified of it have ended.
        """
        self.trace = ambient()
        self._work = work
        self._streams = streams
        self._opened_in_drain = work.leaving
        self.output = output
        self.open: dict[int, Slot[Any, StartT]] = {}
        """Slots in use, by their number."""

    # ---- what a subclass adds --------------------------------------------------------------------

    def _controls(self, message: MessageT) -> Iterable[Any]:
        """Return what a message asks for, in order.

        Raises:
            InvalidRequestError: it can't be said; this ends the stream.
        """
        return (message,)

    @abstractmethod
    def _obey(self, control: Any) -> None:
        """Do one thing that the caller asks for, by `_start` and `_cancel`.

        Raises:
            InvalidRequestError: the caller broke the stream's rules; this ends the stream.
        """

    @abstractmethod
    def _slot(self, number: int) -> Slot[Any, StartT]:
        """Make a slot."""

    # ---- the stream ------------------------------------------------------------------------------

    async def responses(self, messages: AsyncIterator[MessageT]) -> AsyncGenerator[ResponseT, None]:
        """Process the caller's messages; yield responses until every request has ended.

        Raises:
            InvalidRequestError: the caller broke the stream's rules, such as using a slot twice; it
            ends the stream and every request on it.
        """
        output, next_s = self.output, 0.0
        with self._reading(messages) as reader:
            while True:
                if output.filled:
                    if (early_s := next_s - time.monotonic()) > 0:
                        await asyncio.sleep(early_s)
                    next_s = time.monotonic() + self.least_gap_s
                    for response in output.take():
                        yield response
                    continue
                if reader.done():
                    reader.result()
                    if not self.open:
                        return
                output.wake.clear()
                await output.wake.wait()

    @contextlib.contextmanager
    def _reading(self, messages: AsyncIterator[MessageT]) -> Iterator[asyncio.Task[None]]:
        """Obey the caller during the ``with`` block; at its end stop what is open."""
        reader = asyncio.create_task(self._read(messages))
        reader.add_done_callback(lambda _: self.output.wake.set())
        undo = self._work.when_leaving(self.output.drain)
        try:
            with self._streams.track():
                yield reader
        finally:
            undo()
            reader.cancel()
            for slot in list(self.open.values()):
                slot.stop(RequestCancelledError("the caller's stream ended"))

    async def _read(self, messages: AsyncIterator[MessageT]) -> None:
        async for message in messages:
            for count, control in enumerate(self._controls(message), 1):
                self._obey(control)
                while self.output.crowded:
                    await self.output.taken()
                if not count % _CONTROLS_AT_ONCE:
                    await asyncio.sleep(0)  # a message may have a hundred thousand

    def _start(self, number: int, start: StartT) -> None:
        """Begin a request; whatever is wrong with it fails it alone."""
        if number >= MAX_SLOT or number in self.open:
            why = "is in use" if number in self.open else f"must be below {MAX_SLOT}"
            raise InvalidRequestError.of("start.slot", f"{number} {why}")
        slot = self.open[number] = self._slot(number)
        try:
            self._check_accepts()
            slot.start(start)
        except ServingError as error:
            slot.fail(error)
        except Exception as error:  # noqa: BLE001 - one request's bug must not end the others
            slot.fail(internal("a start failed", error))

    def _cancel(self, number: int) -> None:
        if slot := self.open.get(number):
            slot.stop(RequestCancelledError("the caller cancelled the request"))

    def _check_accepts(self) -> None:
        if self._opened_in_drain and self._work.refusing:
            raise WorkerDrainingError(
                f"this {self.server} is shutting down; retry on another one", retry_delay_s=0.1
            )
        self._work.check_in_service()


class Slot(ABC, Generic[SessionT, StartT]):
    """A slot in use, from its request's start to its end. A subclass says how a request runs."""

    __slots__ = ("_deadline", "number", "session", "stopped")

    too_late: ClassVar[str] = "the deadline passed before the request arrived"
    deadline_passed: ClassVar[str] = "the deadline passed before the request had ended"

    def __init__(self, session: SessionT, number: int) -> None:
        self.session = session
        self._deadline: asyncio.TimerHandle | None = None
        self.number = number
        self.stopped: ServingError | None = None
        """Why the session stops the request; None: it doesn't."""

    @abstractmethod
    def start(self, start: StartT) -> None:
        """Begin the request; `free` and one terminal entry follow, at any time.

        Raises:
            ServingError: it was refused.
        """

    @abstractmethod
    def cancel(self) -> None:
        """Ask the running request to end soon."""

    def stop(self, error: ServingError) -> None:
        """End the request with ``error``, unless it ends before."""
        if self.stopped is None:
            self.stopped = error
            self.cancel()

    def run_until(self, deadline_s: float | None) -> None:
        """Stop the request at its deadline, on the clock of `time.monotonic`; None: it has none.

        Raises:
            DeadlinePassedError: it has passed.
        """
        if deadline_s is None:
            return
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise DeadlinePassedError(self.too_late)
        self._deadline = asyncio.get_running_loop().call_later(
            left_s, lambda: self.stop(DeadlinePassedError(self.deadline_passed))
        )

    def free(self) -> None:
        """Leave the slot; call it before the terminal entry."""
        self.session.open.pop(self.number, None)
        if self._deadline is not None:
            self._deadline.cancel()

    def fail(self, error: ServingError) -> None:
        self.free()
        self.session.output.fail(self.number, error)


def internal(event: str, error: BaseException) -> InternalError:
    """Log a bug; return what the caller is told."""
    told = InternalError.with_id()
    log.error(event, error_id=told.error_id, error=error)
    return told
