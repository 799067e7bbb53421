"""Requests of one ability on a link: one stream per connection, each request in a slot."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

import grpc

from millstream_server.links.link import Connection
from millstream_server.links.unread import UnreadOutput, overflow
from millstream_server.runtime.errors import (
    InvalidRequestError,
    RequestCancelledError,
    ServingError,
    WorkerLostError,
)
from millstream_server.runtime.rpc.channel import MAX_WORKER_MESSAGE_BYTES
from millstream_server.runtime.rpc.slot_output import EndT, EntryT, SlotContent
from millstream_server.runtime.telemetry.client_rpcs import observe_call
from millstream_server.runtime.telemetry.request_counts import RequestCounts

RequestT_contra = TypeVar("RequestT_contra", contravariant=True)
RequestT = TypeVar("RequestT")


class SlotRpc(Protocol[RequestT_contra, EntryT, EndT]):
    """What an ability provides for its streams to workers."""

    @property
    def method(self) -> str:
        """The full name without a slash before it: ``package.Service/Method``."""
        ...

    def open(self, channel: grpc.aio.Channel) -> Any:
        """Start the RPC; return its call."""
        ...

    def start(self, slot: int, request: RequestT_contra) -> Any:
        """Make the message that starts a request."""
        ...

    def cancel(self, slot: int) -> Any:
        """Make the message that stops a request."""
        ...

    def nbytes(self, entry: EntryT) -> int:
        """Return about what an entry takes."""
        ...

    def content(self, response: Any) -> SlotContent[EntryT, EndT]:
        """Convert a message of the worker.

        Raises:
            ServingError: it can't be read; this ends the connection.
        """
        ...


class SlotCall(Generic[EntryT, EndT]):
    """One request on its way. It ends once, whatever happens to the worker.

    Read `entries` to their end, then `end`.
    """

    def __init__(
        self, stream: SlotStream[Any, EntryT, EndT], slot: int, unread: UnreadOutput | None = None
    ) -> None:
        """Use `SlotStream.start` to make one."""
        self._stream = stream
        self._slot = slot
        self._unread = unread or UnreadOutput()
        self._taken_bytes = 0
        """Of the entry that was taken last; its reader may still have it."""
        self._entries: deque[tuple[EntryT, bool, int]] = deque()
        self._wake = asyncio.Event()
        self._end: EndT | None = None
        self._error: ServingError | None = None
        self._ended = False
        self._on_end: Callable[[], None] | None = None
        self.cancelled = False

    def when_ended(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` when the worker has ended the request, also if nobody reads entries."""
        self._on_end = callback
        if self._ended:
            callback()

    async def entries(self) -> AsyncIterator[tuple[EntryT, bool]]:
        """Yield entries as they come, and whether only the latest is of interest.

        Of several of these in a row that wait to be read, the last one is kept.

        Raises:
            ServingError: the request failed.
        """
        while True:
            while self._entries:
                entry, latest, self._taken_bytes = self._entries.popleft()
                yield entry, latest
                self._read()
            if self._error is not None:
                raise self._error
            if self._ended:
                return
            self._wake.clear()
            await self._wake.wait()

    @property
    def end(self) -> EndT:
        """The good end, after `entries` ended without an error."""
        if self._end is None:
            message = "the request has not ended"
            raise RuntimeError(message)
        return self._end

    def cancel(self) -> None:
        """Stop the request, at any time, also twice and after the end; drop its entries.

        `entries` then raises RequestCancelledError, unless the request had ended before.
        """
        self._read()
        self._drop()
        self._stream.cancel(self._slot, self)

    # ---- for the stream --------------------------------------------------------------------------

    @property
    def payer(self) -> SlotCall[EntryT, EndT]:
        """See `Gathering.payer`: each request by itself."""
        return self

    def add(self, entry: EntryT, *, latest: bool, nbytes: int = 0) -> None:
        """Take an entry of about ``nbytes``."""
        if self.cancelled:
            return
        if latest and self._entries and self._entries[-1][1]:
            self._unread.remove(self, self._entries.pop()[2])
        self._entries.append((entry, latest, nbytes))
        self._wake.set()
        self._unread.add(self, nbytes)

    def overflowed(self) -> None:
        """Fail: see `UnreadOutput`."""
        self._drop()
        self._stream.cancel(self._slot, self)
        self._error = self._error or overflow()
        self._wake.set()

    def finish(self, end: EndT) -> None:
        """Take the good end."""
        self._end = end
        self._over()

    def fail(self, error: ServingError) -> None:
        """Take the failure."""
        self._error = self._error or error
        self._over()

    def _read(self) -> None:
        """Count the entry that was taken last as read."""
        taken, self._taken_bytes = self._taken_bytes, 0
        self._unread.remove(self, taken)

    def _drop(self) -> None:
        """Drop the entries that were not taken."""
        self._unread.remove(self, sum(nbytes for _, _, nbytes in self._entries))
        self._entries.clear()

    def _over(self) -> None:
        self._ended = True
        self._wake.set()
        if self._on_end is not None:
            self._on_end()


class SlotStream(Generic[RequestT, EntryT, EndT]):
    """The stream of one connection to a worker; the link's `AbilityCalls` for one ability.

    A request's entries gather in the Processor until they are read.
    """

    def __init__(
        self,
        connection: Connection,
        rpc: SlotRpc[RequestT, EntryT, EndT],
        unread: UnreadOutput | None = None,
    ) -> None:
        """Prepare; `run` opens the stream. ``unread`` bounds what gathers."""
        self._connection = connection
        self._unread = unread or UnreadOutput()
        self._view = connection.view
        self._rpc = rpc
        self._counts = RequestCounts(connection.description.role.value)
        self._open: dict[int, SlotCall[EntryT, EndT]] = {}
        self._free: list[int] = []
        self._slots = 0
        self._finishing = False
        self._messages: deque[Any] = deque()
        self._filled = asyncio.Event()

    @property
    def health_service(self) -> str:
        """See `AbilityCalls.health_service`."""
        return self._rpc.method.partition("/")[0]

    # ---- for callers -----------------------------------------------------------------------------

    def start(self, request: RequestT) -> SlotCall[EntryT, EndT]:
        """Start a request.

        Raises:
            InvalidRequestError: it is too large for a worker.
        """
        slot = self._free[-1] if self._free else self._slots
        message = self._rpc.start(slot, request)  # first: if it raises, no slot is used
        _check_size(message.ByteSize())
        if self._free:
            self._free.pop()
        else:
            self._slots += 1
        call = self._open[slot] = SlotCall(self, slot, self._unread)
        self._view.in_flight += 1
        self._view.in_use += 1
        self._counts.begun()
        self._send(message)
        return call

    def cancel(self, slot: int, call: SlotCall[EntryT, EndT]) -> None:
        """Stop a request; see `SlotCall.cancel`."""
        if self._open.get(slot) is call and not call.cancelled:
            call.cancelled = True
            self._view.in_use -= 1
            self._send(self._rpc.cancel(slot))

    # ---- for the link ----------------------------------------------------------------------------

    async def run(self) -> None:
        """Serve until the worker ends the stream, as it also does after `finish`.

        Raises:
            ExceptionGroup: the stream broke, or the worker broke the protocol.
        """
        call = self._rpc.open(self._connection.channel)
        observe_call(call, self._rpc.method)
        async with asyncio.TaskGroup() as group:
            writer = group.create_task(self._write(call))
            try:
                while (response := await call.read()) is not grpc.aio.EOF:  # type: ignore[attr-defined]
                    self._dispatch(self._rpc.content(response))
            finally:
                writer.cancel()
                call.cancel()

    def finish(self) -> None:
        """Close the sending side as soon as no request is open."""
        self._finishing = True
        self._filled.set()

    def close(self) -> None:
        """Fail every request that is open."""
        for slot in list(self._open):
            lost = "the worker that ran this request went away; send it again"
            self._fail(slot, WorkerLostError(lost))

    async def _write(self, call: Any) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            while True:
                while self._messages:
                    await call.write(self._messages.popleft())  # waits while the window is full
                if self._finishing and not self._open:
                    await call.done_writing()
                    return
                self._filled.clear()
                await self._filled.wait()

    # ---- what the worker sends -------------------------------------------------------------------

    def _dispatch(self, content: SlotContent[EntryT, EndT]) -> None:
        self._add(content.latest, latest=True)
        self._add(content.entries, latest=False)
        for slot, end in content.finished:
            call = self._release(slot)
            if call.cancelled:
                self._counts.ended("CANCELLED")
                call.fail(RequestCancelledError("the request was cancelled"))
            else:
                self._counts.ended("OK")
                call.finish(end)
        for slot, error in content.errors:
            self._fail(slot, error)
        if content.draining:
            self._connection.on_draining()

    def _add(self, entries: Sequence[tuple[int, EntryT]], *, latest: bool) -> None:
        for slot, entry in entries:
            self._in_use(slot).add(entry, latest=latest, nbytes=self._rpc.nbytes(entry))

    def _fail(self, slot: int, error: ServingError) -> None:
        call = self._release(slot)
        self._counts.ended(error.reason)
        call.fail(error)

    def _in_use(self, slot: int) -> SlotCall[EntryT, EndT]:
        call = self._open.get(slot)
        if call is None:
            message = f"worker {self._view.address} named slot {slot}, which is not in use"
            raise RuntimeError(message)
        return call

    def _release(self, slot: int) -> SlotCall[EntryT, EndT]:
        call = self._in_use(slot)
        del self._open[slot]
        self._free.append(slot)
        self._view.in_flight -= 1
        if not call.cancelled:
            self._view.in_use -= 1
        self._filled.set()
        return call

    def _send(self, message: Any) -> None:
        self._messages.append(message)
        self._filled.set()


def _check_size(nbytes: int) -> None:
    if nbytes > MAX_WORKER_MESSAGE_BYTES:
        raise InvalidRequestError(
            f"the request has {nbytes} bytes; at most {MAX_WORKER_MESSAGE_BYTES} go to a worker: "
            "send a smaller file or fewer inputs"
        )
