"""Requests of one ability on a link: one stream per connection, each request in a slot."""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Generic, NoReturn, TypeVar

from millstream_server.control.engine import WorkerDescription
from millstream_server.links.channel import CallError, Channel, Rpc, Stream
from millstream_server.routing.workers import Place, WorkerView
from millstream_server.runtime.errors import EngineFailedError, ServingError, WorkerLostError
from millstream_server.runtime.telemetry.counts import RequestCounts
from millstream_server.runtime.telemetry.log import get_log

log = get_log(__name__)

_ONE_DEATH_S = 1.0
"""What a worker's death ends is told within this time, request by request."""


@dataclass(frozen=True, slots=True)
class Connection:
    """One connection to a worker, for its streams."""

    channel: Channel
    description: WorkerDescription
    view: WorkerView
    """The streams count their requests there, the link sets the rest."""
    on_draining: Callable[[], None]
    """Called when the worker announces its shutdown on a stream."""


class OpenRequest(ABC):
    """One request in a slot of a worker's stream. It ends once, whatever happens to the worker."""

    __slots__ = ("_stream", "cancelled", "pending_tokens", "place", "slot")

    def __init__(
        self, stream: SlotStream[Any], slot: int, place: Place, pending_tokens: int = 0
    ) -> None:
        """Use the stream's `start` to make one."""
        self._stream = stream
        self.slot = slot
        self.place = place
        """Where it counts: the worker, or one of its ranks."""
        self.pending_tokens = pending_tokens
        """Prompt tokens that are still to be computed there, as expected."""
        self.cancelled = False

    def cancel(self) -> None:
        """Stop it, at any time, also twice and after the end."""
        self._stream.cancel(self)

    @abstractmethod
    def fail(self, error: ServingError) -> None:
        """Take the failure that ended it. For the stream."""


OpenT = TypeVar("OpenT", bound=OpenRequest)


class SlotStream(ABC, Generic[OpenT]):
    """The stream of one connection to a worker: slots, reader, writer, end. Ability by subclass.

    A subclass has a `start`, which writes a message and then calls `_begin`; `_receive`, which
    hands on what a message brings; and its own kind of `OpenRequest`. A request uses a slot until
    the worker has ended it, also when it is cancelled: until then the worker may still send for it.

    A worker that breaks the protocol ends the connection, and with it all its requests.
    """

    lost = "the worker that ran this request went away; send it again"
    """What requests are told when the connection ends."""
    gather_s = 0.0
    """Least time between two messages to the worker while several requests are open."""

    def __init__(self, connection: Connection, rpc: Rpc, counts: RequestCounts) -> None:
        self.rpc = rpc
        self.view = connection.view
        self._connection = connection
        self._counts = counts
        self._open: dict[int, OpenT] = {}
        """By slot."""
        self._free: list[int] = []
        self._slots = 0
        """Used ones and free ones."""
        self._messages: deque[Any] = deque()
        self._filled = asyncio.Event()
        """Set when there may be a message to send, or nothing more to wait for."""
        self._finishing = False
        self._death = (-_ONE_DEATH_S, 0)
        """When the worker or its engine died, and how many requests it ran then."""

    # ---- for the link ----------------------------------------------------------------------------

    async def run(self) -> None:
        """Serve until the worker ends the stream, as it also does after `finish`.

        Raises:
            ExceptionGroup: the stream broke, or the worker broke the protocol.
        """
        stream = self._connection.channel.stream(self.rpc)
        async with asyncio.TaskGroup() as group:
            writer = group.create_task(self._write(stream))
            try:
                while (message := await stream.read()) is not None:
                    if rest := self._receive(message):
                        await rest
            finally:
                writer.cancel()
                stream.cancel()

    def finish(self) -> None:
        """Close the sending side as soon as no request is open; the worker then ends the stream."""
        self._finishing = True
        self._filled.set()

    def close(self) -> None:
        """Fail every request that is open; called once, after `run`."""
        for slot in list(self._open):
            error = WorkerLostError(self.lost)
            error.was_leaving = self._finishing
            self._fail(slot, error)

    # ---- requests --------------------------------------------------------------------------------

    def cancel(self, opened: OpenT) -> None:
        slot = opened.slot
        if self._open.get(slot) is opened and not opened.cancelled:
            opened.cancelled = True
            self.view.cancelled()
            self._next_control().cancel.slot = slot
            self._filled.set()

    def _next_slot(self) -> int:
        return self._free[-1] if self._free else self._slots

    def _begin(self, opened: OpenT) -> None:
        """Take the next slot for a request whose start was added to the messages."""
        if self._free:
            self._free.pop()
        else:
            self._slots += 1
        self._open[opened.slot] = opened
        self.view.begin(opened.place, opened.pending_tokens)
        self._counts.begun()
        self._filled.set()

    def _in_use(self, slot: int) -> OpenT:
        return self._open.get(slot) or self._broken(f"named slot {slot}, which is not in use")

    def _release(self, slot: int) -> OpenT:
        """Free the slot of a request that has ended; it is then told its end."""
        opened = self._open.pop(slot, None) or self._in_use(slot)
        self._free.append(slot)
        self._freed(slot)
        self.view.end(opened.place, opened.pending_tokens, cancelled=opened.cancelled)
        if self._finishing:
            self._filled.set()
        return opened

    @property
    def _requests(self) -> int:
        """How many requests are open."""
        return len(self._open)

    def _freed(self, slot: int) -> None:
        """Forget what the ability keeps of a slot."""

    def _fail(self, slot: int, error: ServingError) -> None:
        if isinstance(error, WorkerLostError | EngineFailedError):
            now = asyncio.get_running_loop().time()
            if now - self._death[0] > _ONE_DEATH_S:
                self._death = now, self._requests
            error.open_requests = self._death[1]
        opened = self._release(slot)
        self._counts.ended(error.reason)
        self._tell(opened.fail, error)

    def _tell(self, take: Callable[[Any], None], end: Any) -> None:
        """Tell whoever waits for a request its end; one that breaks must not end the others."""
        try:
            take(end)
        except Exception as fault:  # noqa: BLE001
            log.error("a request's end failed", worker=self.view.address, error=fault)

    def _broken(self, what: str) -> NoReturn:
        """End the connection: the worker has broken the protocol."""
        message = f"worker {self.view.address} {what}"
        raise RuntimeError(message)

    # ---- what goes to the worker, and comes from it ----------------------------------------------

    @abstractmethod
    def _receive(self, message: Any) -> Awaitable[None] | None:
        """Hand a message's content to the requests; return the rest of a large one's work.

        Raises:
            Exception: it can't be read, which ends the connection.
        """

    def _next_control(self) -> Any:
        """Add an empty message; return where its start or cancel is written."""
        message = self.rpc.request()
        self._messages.append(message)
        return message

    def _take(self) -> Any:
        """Remove and return the next message, None when there is none."""
        return self._messages.popleft() if self._messages else None

    @property
    def _idle(self) -> bool:
        return not self._open

    async def _write(self, stream: Stream) -> None:
        with contextlib.suppress(CallError):  # the reader gets it, too
            while True:
                while (message := self._take()) is not None:
                    await stream.write(message)  # waits while the worker's window is full
                    if self.gather_s and len(self._open) > 1:
                        await asyncio.sleep(self.gather_s)
                if self._finishing and self._idle:
                    await stream.done_writing()
                    return
                self._filled.clear()
                await self._filled.wait()
