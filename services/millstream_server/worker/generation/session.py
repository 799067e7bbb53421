"""The worker's side of one stream: controls in, step frames out."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from typing import Any

from millstream.v1 import generation_pb2
from millstream_server.generation.stream_metrics import stream_metrics
from millstream_server.protobuf import generation as convert
from millstream_server.runtime.errors import (
    InternalError,
    InvalidRequestError,
    ServingError,
    WorkerDrainingError,
)
from millstream_server.runtime.telemetry.log import get_log
from millstream_server.runtime.telemetry.trace_context import NOT_TRACED
from millstream_server.runtime.telemetry.tracing import ambient
from millstream_server.worker.generation.frames import FrameBuilder
from millstream_server.worker.generation.slot import RequestRunner, Slot

log = get_log(__name__)

MAX_SLOT = 1 << 20
_GATHER_S = 0.001
"""Least time between two frames of a stream. A frame costs each end some 50 us whatever is in it;
engine steps are 10 ms apart, so frames wait only where many requests start and end."""
_CONTROLS_AT_ONCE = 64
"""A start costs some 0.2 ms; other streams wait so long."""


class WorkerSession:
    """One stream's requests; for one stream only.

    A servicer uses it as: ``with session.reading(requests)``, then `next` until None.
    """

    def __init__(self, runner: RequestRunner, response_type: Callable[[], Any]) -> None:
        """Run requests on ``runner``; ``response_type`` is a message with a field `frame`."""
        self._runner = runner
        self._opened_in_drain = runner.work.leaving
        """Whether the stream was opened after the drain began."""
        self._trace = NOT_TRACED
        """The stream's trace context: the parent of requests without their own."""
        self._frames = FrameBuilder(response_type, stream_metrics(runner.role))
        self._slots: dict[int, Slot] = {}
        self._reader: asyncio.Future[None] | None = None
        self._gather_until_s = 0.0

    @contextlib.contextmanager
    def reading(self, controls: AsyncIterator[Any]) -> Iterator[None]:
        """Process PrefillRequest or DecodeRequest messages; at the end stop open requests."""
        frames = self._frames
        self._trace = ambient()
        reader = self._reader = asyncio.ensure_future(self._read(controls))
        reader.add_done_callback(lambda _: frames.wake.set())
        undo = self._runner.work.when_leaving(frames.drain)
        try:
            with self._runner.streams.track():
                yield
        finally:
            undo()
            reader.cancel()
            for slot in list(self._slots.values()):
                slot.abandon()

    @property
    def held_bytes(self) -> int:
        """About what waits to be sent, in memory."""
        return self._frames.held_bytes if self._frames.filled else 0

    async def next(self) -> Any | None:
        """Wait for the next response; None when the caller has closed and every slot has ended.

        Raises:
            InvalidRequestError: the caller broke the stream's rules, such as using a slot twice; it
            ends the stream and every request on it.
        """
        frames, reader = self._frames, self._reader
        while not frames.filled:
            if reader is not None and reader.done():
                reader.result()
                if not self._slots:
                    return None
            await frames.wake.wait()
            frames.wake.clear()
        early_s = self._gather_until_s - time.monotonic()
        if early_s > 0:
            await asyncio.sleep(early_s)
        self._gather_until_s = time.monotonic() + _GATHER_S
        return frames.take()

    async def _read(self, controls: AsyncIterator[Any]) -> None:
        async for message in controls:
            if not message.controls:
                self._obey(message)
            elif message.WhichOneof("control"):
                raise InvalidRequestError.of("controls", "set either this or one of start, cancel")
            for number, control in enumerate(message.controls):
                self._obey(control)
                await self._frames.short()
                if number % _CONTROLS_AT_ONCE == _CONTROLS_AT_ONCE - 1:
                    await asyncio.sleep(0)  # a message may have a hundred thousand
            await self._frames.short()

    def _obey(self, message: Any) -> None:
        kind = message.WhichOneof("control")
        if kind == "start":
            self._start(message.start)
        elif kind == "cancel":
            slot = self._slots.get(message.cancel.slot)
            if slot is not None:
                slot.cancel()
        else:
            raise InvalidRequestError.of("control", "set one of start, cancel")

    def _start(self, message: generation_pb2.StartGeneration) -> None:
        number = message.slot
        if number >= MAX_SLOT or number in self._slots:
            why = "is in use" if number in self._slots else f"must be below {MAX_SLOT}"
            raise InvalidRequestError.of("start.slot", f"{number} {why}")
        slot = self._slots[number] = Slot(number, self._runner, self._frames, self._release)
        try:
            self._check_accepts()
            context_length = self._runner.context_length_of(message.model)
            request = convert.start_from_proto(message, context_length)
            if self._trace is not NOT_TRACED and not request.trace.traceparent:
                request = replace(request, trace=self._trace)
            slot.start(request)
        except ServingError as error:
            slot.fail(error)
        except Exception as error:  # noqa: BLE001 - one request's bug must not end the others
            internal = InternalError.with_id()
            log.error("a start failed", error_id=internal.error_id, error=error)
            slot.fail(internal)

    def _release(self, number: int) -> None:
        # The slot may be gone: an engine may report the end of a request after its stream has
        # ended.
        self._slots.pop(number, None)

    def _check_accepts(self) -> None:
        if self._opened_in_drain and self._runner.work.refusing:
            raise WorkerDrainingError(
                "this worker is shutting down; retry on another one", retry_delay_s=0.1
            )
        self._runner.work.check_in_service()
