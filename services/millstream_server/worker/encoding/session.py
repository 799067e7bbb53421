"""The worker's side of one Encode stream: items in, results out."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

from millstream.v1 import encode_pb2
from millstream_server.protobuf.encode import file_from_proto
from millstream_server.runtime.errors import (
    InternalError,
    InvalidRequestError,
    ServingError,
    WorkerDrainingError,
)
from millstream_server.runtime.telemetry.log import get_log
from millstream_server.runtime.telemetry.trace_context import NOT_TRACED
from millstream_server.runtime.telemetry.tracing import ambient
from millstream_server.worker.encoding.responses import ResponseBuilder
from millstream_server.worker.encoding.slot import ItemRunner, ItemSlot

log = get_log(__name__)

MAX_SLOT = 1 << 20


class EncodeSession:
    """One stream's items and leases; for one stream only.

    A servicer uses it as: ``with session.reading(requests)``, then `next` until None.
    """

    def __init__(self, runner: ItemRunner) -> None:
        """Encode items on ``runner``."""
        self._runner = runner
        self._opened_in_drain = runner.work.leaving
        """Whether the stream was opened after the drain began."""
        self._trace = NOT_TRACED
        """The stream's trace context: the parent of items without their own."""
        self._responses = ResponseBuilder()
        self._slots: dict[int, ItemSlot] = {}
        self._reader: asyncio.Future[None] | None = None

    @contextlib.contextmanager
    def reading(self, requests: AsyncIterator[encode_pb2.EncodeRequest]) -> Iterator[None]:
        """Process messages; at the end stop open items and end the leases."""
        responses = self._responses
        self._trace = ambient()
        reader = self._reader = asyncio.ensure_future(self._read(requests))
        reader.add_done_callback(lambda _: responses.wake.set())
        undo = self._runner.work.when_leaving(responses.drain)
        try:
            with self._runner.streams.track():
                yield
        finally:
            undo()
            reader.cancel()
            for slot in list(self._slots.values()):
                slot.abandon()
            self._runner.release_all(self)

    async def next(self) -> encode_pb2.EncodeResponse | None:
        """Wait for the next response; None when the caller has closed and every slot has ended.

        Raises:
            InvalidRequestError: the caller broke the stream's rules, such as using a slot twice; it
            ends the stream and every item on it.
        """
        responses, reader = self._responses, self._reader
        while not responses.filled:
            if reader is not None and reader.done():
                reader.result()
                if not self._slots:
                    return None
            await responses.wake.wait()
            responses.wake.clear()
        return responses.take()

    async def _read(self, requests: AsyncIterator[encode_pb2.EncodeRequest]) -> None:
        async for message in requests:
            self._obey(message)

    def _obey(self, message: encode_pb2.EncodeRequest) -> None:
        match message.WhichOneof("control"):
            case "start":
                self._start(message.start)
            case "more":
                # Bytes of a slot that has just failed may still be on their way: no error.
                if slot := self._slots.get(message.more.slot):
                    slot.more(message.more.data)
            case "cancel":
                if slot := self._slots.get(message.cancel.slot):
                    slot.cancel()
            case "release":
                self._runner.release(message.release.lease)
            case _:
                raise InvalidRequestError.of("control", "set one of start, more, cancel, release")

    def _start(self, message: encode_pb2.EncodeItem) -> None:
        number = message.slot
        if number >= MAX_SLOT or number in self._slots:
            why = "is in use" if number in self._slots else f"must be below {MAX_SLOT}"
            raise InvalidRequestError.of("start.slot", f"{number} {why}")
        slot = ItemSlot(number, self._runner, self._responses, self._release)
        self._slots[number] = slot
        try:
            self._check_accepts()
            file = file_from_proto(message)
            if self._trace is not NOT_TRACED and not file.trace.traceparent:
                file = replace(file, trace=self._trace)
            slot.start(file, message.total_bytes, self)
        except ServingError as error:
            slot.fail(error)
        except Exception as error:  # noqa: BLE001 - one item's bug must not end the others
            internal = InternalError.with_id()
            log.error("a start failed", error_id=internal.error_id, error=error)
            slot.fail(internal)

    def _release(self, number: int) -> None:
        self._slots.pop(number, None)

    def _check_accepts(self) -> None:
        if self._opened_in_drain and self._runner.work.refusing:
            raise WorkerDrainingError(
                "this worker is shutting down; retry on another one", retry_delay_s=0.1
            )
        self._runner.work.check_in_service()
