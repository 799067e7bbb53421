"""A chat's images and videos on a link: items to their results."""

from __future__ import annotations

import asyncio
from typing import Any

from millstream.v1 import encode_pb2
from millstream_server.control.engine import Role
from millstream_server.encode.wire import write_item
from millstream_server.links.channel import rpc_of
from millstream_server.links.slot_stream import Connection, OpenRequest, SlotStream
from millstream_server.media.items import EncodedItem, MediaFile
from millstream_server.protobuf.errors import error_from_proto
from millstream_server.protobuf.media import ref_from_proto
from millstream_server.runtime.errors import (
    InternalError,
    InvalidRequestError,
    RequestCancelledError,
    ServingError,
)
from millstream_server.runtime.telemetry.counts import stream_metrics
from millstream_server.runtime.telemetry.log import get_log

log = get_log(__name__)

INLINE_BYTES = 64 << 10
"""A file up to this size goes with its start: asking first would cost more."""
CHUNK_BYTES = 256 << 10
"""Larger ones hold up what is sent after them, and aren't faster."""
_ENCODE = rpc_of(encode_pb2.DESCRIPTOR, "EncodeService/Encode")


class Encoding(OpenRequest):
    """One item on its way to its result."""

    __slots__ = ("_future", "file")
    _stream: EncodeStream

    def __init__(self, stream: EncodeStream, slot: int, file: MediaFile) -> None:
        """Use `EncodeStream.start` to make one."""
        super().__init__(stream, slot, stream.view)
        self._future: asyncio.Future[EncodedItem] = asyncio.get_running_loop().create_future()
        self._future.add_done_callback(_take_exception)
        self.file: MediaFile | None = file
        """The file, until the end."""

    async def result(self) -> EncodedItem:
        """Wait for the result; whoever gets it calls `EncodeStream.release` when it is used.

        Cancelling this call cancels the item, or gives back a result that came just before.

        Raises:
            ServingError: it wasn't encoded; RequestCancelledError after `cancel`, unless the item
                had ended before.
        """
        try:
            return await asyncio.shield(self._future)
        except asyncio.CancelledError:
            self.cancel()
            if self._future.done() and self._future.exception() is None:
                self._stream.release(self._future.result().lease)
            raise

    def finish(self, item: EncodedItem) -> None:
        self.file = None
        self._future.set_result(item)

    def fail(self, error: ServingError) -> None:
        self.file = None
        self._future.set_exception(error)


class EncodeStream(SlotStream[Encoding]):
    """The stream of a chat's images and videos.

    The file's SHA-256 goes first, and its bytes only if the worker wants them. `finish` keeps the
    stream open while results are leased on it: the worker gives them up when the stream ends.

    Controls are sent before files. Files that the worker wants take turns, one chunk each, so that
    a large one doesn't delay the others. A chunk is copied only when it is sent.
    """

    lost = "the worker that encoded this image or video went away; send it again"

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection, _ENCODE, stream_metrics(Role.ENCODE.value))
        self._leases: dict[str, asyncio.TimerHandle] = {}
        self._uploads: dict[int, memoryview] = {}
        """By slot, what is left to send of its file; the first one is next."""

    def start(self, file: MediaFile) -> Encoding:
        """Start to encode ``file``; its data is not copied and must stay as it is."""
        slot = self._next_slot()
        message = encode_pb2.EncodeRequest()
        write_item(message.start, slot, file, inline=len(file.data) <= INLINE_BYTES)
        self._messages.append(message)  # last: if it can't be written, no slot is used
        encoding = Encoding(self, slot, file)
        self._begin(encoding)
        return encoding

    def cancel(self, opened: Encoding) -> None:
        """See `SlotStream.cancel`; no more of its file is sent."""
        if self._open.get(opened.slot) is opened:
            self._uploads.pop(opened.slot, None)
            super().cancel(opened)

    def release(self, lease: str) -> None:
        """Give a result back; without effect when its lease or the connection has ended."""
        if timer := self._leases.pop(lease, None):
            timer.cancel()
            self._next_control().release.lease = lease
            self._filled.set()

    def close(self) -> None:
        """See `SlotStream.close`; the leases have ended, too."""
        for timer in self._leases.values():
            timer.cancel()
        self._leases.clear()
        super().close()

    def _take(self) -> Any:
        if self._messages or not self._uploads:
            return super()._take()
        slot = next(iter(self._uploads))
        left = self._uploads.pop(slot)
        message = encode_pb2.EncodeRequest()
        message.more.slot = slot
        message.more.data = bytes(left[:CHUNK_BYTES])
        if len(left) > CHUNK_BYTES:
            self._uploads[slot] = left[CHUNK_BYTES:]  # behind the others
        return message

    @property
    def _idle(self) -> bool:
        return super()._idle and not self._leases

    # ---- what the worker sends -------------------------------------------------------------------

    def _receive(self, message: Any) -> None:
        response: encode_pb2.EncodeResponse = message
        for slot in response.wanted:
            encoding = self._in_use(slot)
            if encoding.file is not None and not encoding.cancelled:
                self._uploads[slot] = memoryview(encoding.file.data)
                self._filled.set()
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
        self._counts.ended("OK")
        self._tell(encoding.finish, item)

    def _drop(self, entry: encode_pb2.EncodedItem, error: ServingError) -> None:
        """Give back a result that nobody takes."""
        self.release(entry.ref.lease)
        self._fail(entry.slot, error)

    def _hold(self, lease: str, left_s: float) -> None:
        loop = asyncio.get_running_loop()
        self._leases[lease] = loop.call_later(left_s, self._expired, lease)

    def _expired(self, lease: str) -> None:
        self._leases.pop(lease, None)
        self._filled.set()

    def _freed(self, slot: int) -> None:
        self._uploads.pop(slot, None)


def _take_exception(future: asyncio.Future[EncodedItem]) -> None:
    """Keep asyncio from reporting a failure that nobody waits for."""
    if not future.cancelled():
        future.exception()
