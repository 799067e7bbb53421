"""Images and videos on a link: one stream per connection, items in slots, results to futures."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import grpc

from millstream.v1 import encode_pb2, encode_pb2_grpc
from millstream_server.engines.base import Role
from millstream_server.generation.stream_metrics import stream_metrics
from millstream_server.links.link import Connection
from millstream_server.links.upload_outbox import UploadOutbox
from millstream_server.media.file import MediaFile
from millstream_server.media.items import EncodedItem
from millstream_server.protobuf.errors import error_from_proto
from millstream_server.protobuf.media import ref_from_proto
from millstream_server.runtime.errors import (
    InternalError,
    InvalidRequestError,
    RequestCancelledError,
    ServingError,
    WorkerLostError,
)
from millstream_server.runtime.telemetry.client_rpcs import observe_call
from millstream_server.runtime.telemetry.log import get_log

log = get_log(__name__)

_SERVICE = "millstream.v1.EncodeService"


class Encoding:
    """One item on its way. The result is there once, whatever happens to the worker."""

    __slots__ = ("_future", "_slot", "_stream", "cancelled", "file")

    def __init__(self, stream: EncodeStream, slot: int, file: MediaFile) -> None:
        """Use `EncodeStream.start` to make one."""
        self._stream = stream
        self._slot = slot
        self._future: asyncio.Future[EncodedItem] = asyncio.get_running_loop().create_future()
        self._future.add_done_callback(_take_exception)
        self.cancelled = False
        self.file: MediaFile | None = file
        """The file, until the end."""

    async def result(self) -> EncodedItem:
        """Wait for the result; whoever gets it calls `EncodeStream.release` when it is used.

        Cancelling this call cancels the item, or gives back a result that came just before.

        Raises:
            ServingError: it wasn't encoded.
        """
        try:
            return await asyncio.shield(self._future)
        except asyncio.CancelledError:
            self.cancel()
            if self._future.done() and self._future.exception() is None:
                self._stream.release(self._future.result().lease)
            raise

    def cancel(self) -> None:
        """Stop the item, at any time, also twice and after the end.

        `result` then raises RequestCancelledError, unless the item had ended before.
        """
        self._stream.cancel(self._slot, self)

    def finish(self, item: EncodedItem) -> None:
        """Set the result. For the stream."""
        self.file = None
        self._future.set_result(item)

    def fail(self, error: ServingError) -> None:
        """Set the failure. For the stream."""
        self.file = None
        self._future.set_exception(error)


class EncodeStream:
    """The Encode stream of one connection to a worker; the link's `AbilityCalls` for media.

    The file's SHA-256 goes first, and its bytes only if the worker wants them. `finish` keeps the
    stream open while results are leased on it: the worker gives them up when the stream ends.
    """

    health_service = _SERVICE

    def __init__(self, connection: Connection) -> None:
        """Prepare; `run` opens the stream."""
        self._connection = connection
        self._view = connection.view
        self._metrics = stream_metrics(Role.ENCODE)
        self._open: dict[int, Encoding] = {}
        self._free: list[int] = []
        self._slots = 0
        self._leases: dict[str, asyncio.TimerHandle] = {}
        self._finishing = False
        self._outbox = UploadOutbox()

    # ---- for callers -----------------------------------------------------------------------------

    def start(self, file: MediaFile) -> Encoding:
        """Start to encode ``file``; its data is not copied and must stay as it is."""
        slot = self._free[-1] if self._free else self._slots
        self._outbox.start(slot, file)  # first: if it raises, no slot is used
        if self._free:
            self._free.pop()
        else:
            self._slots += 1
        encoding = self._open[slot] = Encoding(self, slot, file)
        self._view.in_flight += 1
        self._view.in_use += 1
        self._metrics.begun()
        return encoding

    def cancel(self, slot: int, encoding: Encoding) -> None:
        """Stop an item; see `Encoding.cancel`."""
        if self._open.get(slot) is encoding and not encoding.cancelled:
            encoding.cancelled = True
            self._view.in_use -= 1
            self._outbox.cancel(slot)

    def release(self, lease: str) -> None:
        """Give a result back; without effect when its lease or the connection has ended."""
        if timer := self._leases.pop(lease, None):
            timer.cancel()
            self._outbox.release(lease)

    # ---- for the link ----------------------------------------------------------------------------

    async def run(self) -> None:
        """Serve until the worker ends the stream, as it also does after `finish`.

        Raises:
            ExceptionGroup: the stream broke, or the worker broke the protocol.
        """
        method: Any = encode_pb2_grpc.EncodeServiceStub(self._connection.channel).Encode
        call = method()
        observe_call(call, f"{_SERVICE}/Encode")
        async with asyncio.TaskGroup() as group:
            writer = group.create_task(self._write(call))
            try:
                while (response := await call.read()) is not grpc.aio.EOF:  # type: ignore[attr-defined]
                    self._dispatch(response)
            finally:
                writer.cancel()
                call.cancel()

    def finish(self) -> None:
        """Close the sending side as soon as no item is open and no result is leased."""
        self._finishing = True
        self._outbox.filled.set()

    def close(self) -> None:
        """Fail every item that is open."""
        for timer in self._leases.values():
            timer.cancel()
        self._leases.clear()
        for slot in list(self._open):
            lost = "the worker that encoded this image or video went away; send it again"
            self._fail(slot, WorkerLostError(lost))

    async def _write(self, call: Any) -> None:
        outbox = self._outbox
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            while True:
                while (message := outbox.take()) is not None:
                    await call.write(message)  # waits while the worker's window is full
                if self._finishing and not self._open and not self._leases:
                    await call.done_writing()
                    return
                outbox.filled.clear()
                await outbox.filled.wait()

    # ---- what the worker sends -------------------------------------------------------------------

    def _dispatch(self, response: encode_pb2.EncodeResponse) -> None:
        for slot in response.wanted:
            encoding = self._in_use(slot)
            if encoding.file is not None and not encoding.cancelled:
                self._outbox.upload(slot, encoding.file)
        for entry in response.encoded:
            self._finish(entry)
        for failure in response.errors:
            self._fail(failure.slot, error_from_proto(failure.error))
        if response.draining:
            self._connection.on_draining()

    def _finish(self, entry: encode_pb2.EncodedItem) -> None:
        encoding = self._in_use(entry.slot)
        self._hold(entry.ref.lease, entry.ref.lease_left.ToNanoseconds() / 1e9)
        file = encoding.file
        if encoding.cancelled or file is None:
            self._drop(entry, RequestCancelledError("the item was cancelled"))
            return
        try:
            item = ref_from_proto(entry.ref, file.modality)
        except InvalidRequestError as error:
            fault = InternalError.with_id()
            log.error("a result can't be read", error_id=fault.error_id, error=error)
            self._drop(entry, fault)
            return
        self._release(entry.slot)
        self._metrics.ended("OK")
        encoding.finish(item)

    def _drop(self, entry: encode_pb2.EncodedItem, error: ServingError) -> None:
        """Give back a result that nobody takes."""
        self.release(entry.ref.lease)
        self._fail(entry.slot, error)

    def _hold(self, lease: str, left_s: float) -> None:
        loop = asyncio.get_running_loop()
        self._leases[lease] = loop.call_later(left_s, self._expired, lease)

    def _expired(self, lease: str) -> None:
        self._leases.pop(lease, None)
        self._outbox.filled.set()

    def _fail(self, slot: int, error: ServingError) -> None:
        encoding = self._in_use(slot)
        self._release(slot)
        self._metrics.ended(error.reason)
        encoding.fail(error)

    def _in_use(self, slot: int) -> Encoding:
        encoding = self._open.get(slot)
        if encoding is None:
            message = f"worker {self._view.address} named slot {slot}, which is not in use"
            raise RuntimeError(message)
        return encoding

    def _release(self, slot: int) -> None:
        encoding = self._open.pop(slot)
        self._free.append(slot)
        self._outbox.ended(slot)
        self._view.in_flight -= 1
        if not encoding.cancelled:
            self._view.in_use -= 1
        self._outbox.filled.set()


def _take_exception(future: asyncio.Future[EncodedItem]) -> None:
    """Keep asyncio from reporting a failure that nobody waits for."""
    if not future.cancelled():
        future.exception()
