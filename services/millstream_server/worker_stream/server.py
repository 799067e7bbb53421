"""The worker's end of the stream: slots in, step frames out.

One `WorkerSession` lives as long as one stream. Engines push tokens into slots; everything pushed
in one turn of the event loop leaves in one frame; while a write is in progress tokens gather, so a
slow reader gets fewer, larger frames, and never more than its requests' max_new_tokens.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any, Protocol

from millstream.v1 import generation_pb2
from millstream_server.engines.base import Finish, FinishReason, OutputSink, Role, TokenLogprob
from millstream_server.runtime.drain import OpenWork
from millstream_server.runtime.errors import (
    DeadlinePassedError,
    InternalError,
    InvalidRequestError,
    ServingError,
    WorkerDrainingError,
)
from millstream_server.runtime.tracing import NOT_TRACED, ambient
from millstream_server.worker_stream import convert
from millstream_server.worker_stream.start import GenerationStart
from millstream_server.worker_stream.stream_metrics import stream_metrics

logger = logging.getLogger(__name__)

MAX_SLOT = 1 << 20


class Generator(Protocol):
    """What a session runs requests on (`worker.core.WorkerCore`)."""

    role: Role
    """What the worker is."""
    work: OpenWork
    """Requests; and whether the worker drains."""
    streams: OpenWork
    """Streams; a drain waits for those that were told of it."""

    @property
    def context_length(self) -> int:
        """Most tokens of prompt and completion."""
        ...

    def submit(self, start: GenerationStart, sink: OutputSink) -> str:
        """Check and start a request; answers the id to cancel it by.

        Raises:
            ServingError: it was refused.
        """
        ...

    def cancel(self, engine_id: str) -> None:
        """Stop a request at any stage."""
        ...


class WorkerSession:
    """One stream's requests."""

    def __init__(self, generator: Generator) -> None:
        """Run requests on ``generator``."""
        self._generator = generator
        self._late = generator.work.leaving
        """Opened although the worker was leaving: not one that takes what crosses the news."""
        self._metrics = stream_metrics(generator.role)
        self._trace = NOT_TRACED
        """What the stream came with: the parent of requests that bring none of their own."""
        self._slots: dict[int, _Slot] = {}
        self._columns = _Columns()
        self._wake = asyncio.Event()
        self._sequence = 0

    async def frames(self, controls: AsyncIterator[Any]) -> AsyncIterator[generation_pb2.StepFrame]:
        """Serve PrefillRequest or DecodeRequest messages until the caller closes and all ended.

        Raises:
            InvalidRequestError: the caller broke the stream's own rules (a slot used twice); every
                request on the stream ends with it.
        """
        self._trace = ambient()
        reader = asyncio.ensure_future(self._read(controls))
        reader.add_done_callback(lambda _: self._wake.set())
        unwatch = self._generator.work.when_leaving(self._announce_drain)
        try:
            with self._generator.streams.track():
                async for frame in self._frames(reader):
                    yield frame
        finally:
            unwatch()
            reader.cancel()
            for slot in list(self._slots.values()):
                slot.abandon()

    async def _frames(
        self, reader: asyncio.Future[None]
    ) -> AsyncIterator[generation_pb2.StepFrame]:
        while True:
            if self._columns.filled:
                yield self._take_frame()
                continue
            if reader.done():
                reader.result()
                if not self._slots:
                    return
            await self._wake.wait()
            self._wake.clear()

    async def _read(self, controls: AsyncIterator[Any]) -> None:
        async for message in controls:
            kind = message.WhichOneof("control")
            if kind == "start":
                self._start(message.start)
            elif kind == "cancel":
                slot = self._slots.get(message.cancel.slot)
                if slot:
                    slot.cancel()
            else:
                raise InvalidRequestError.of("control", "set one of start, cancel")

    def _start(self, message: generation_pb2.StartGeneration) -> None:
        number = message.slot
        if number >= MAX_SLOT or number in self._slots:
            why = "is in use" if number in self._slots else f"must be below {MAX_SLOT}"
            raise InvalidRequestError.of("start.slot", f"{number} {why}")
        slot = self._slots[number] = _Slot(self, number)
        try:
            self._check_open()
            start = convert.start_from_proto(message, self._generator.context_length)
            if not start.trace.traceparent and self._trace.traceparent:
                start = replace(start, trace=self._trace)
            slot.begin(start)
        except ServingError as error:
            slot.fail(error)
        except Exception:  # one request's accident must not end the stream's others
            internal = InternalError.with_id()
            logger.exception("error_id=%s start failed", internal.error_id)
            slot.fail(internal)

    def _check_open(self) -> None:
        if self._late and self._generator.work.refusing:
            raise WorkerDrainingError(
                "this worker is shutting down; retry on another one", retry_delay_s=0.1
            )

    def _announce_drain(self) -> None:
        self._columns.filled = self._columns.draining = True
        self._wake.set()

    def _take_frame(self) -> generation_pb2.StepFrame:
        columns, self._columns = self._columns, _Columns()
        self._sequence += 1
        self._metrics.frame(len(columns.token_ids))
        return columns.to_proto(self._sequence)


class _Columns:
    """A frame in the making."""

    __slots__ = (
        "counts",
        "draining",
        "errors",
        "filled",
        "finishes",
        "logprobs",
        "slots",
        "token_ids",
    )

    def __init__(self) -> None:
        self.filled = False
        self.draining = False
        self.slots: list[int] = []
        self.counts: list[int] = []
        self.token_ids: list[int] = []
        self.logprobs: list[generation_pb2.SlotLogprobs] = []
        self.finishes: list[generation_pb2.SlotFinish] = []
        self.errors: list[generation_pb2.SlotError] = []

    def to_proto(self, sequence: int) -> generation_pb2.StepFrame:
        one_each = len(self.slots) == len(self.token_ids)
        return generation_pb2.StepFrame(
            sequence=sequence,
            slots=self.slots,
            token_counts=() if one_each else self.counts,
            token_ids=self.token_ids,
            logprobs=self.logprobs,
            finishes=self.finishes,
            errors=self.errors,
            draining=self.draining,
        )


class _Slot:
    """One request: the engine's sink, the caller's slot."""

    __slots__ = ("_deadline", "_deadline_passed", "_engine_id", "_number", "_session")

    def __init__(self, session: WorkerSession, number: int) -> None:
        self._session = session
        self._number = number
        self._engine_id = ""
        self._deadline: asyncio.TimerHandle | None = None
        self._deadline_passed = False

    def begin(self, start: GenerationStart) -> None:
        if start.timeout_s is not None:
            if start.timeout_s <= 0:
                message = "the deadline passed before the request reached the worker"
                raise DeadlinePassedError(message)
            loop = asyncio.get_running_loop()
            self._deadline = loop.call_later(start.timeout_s, self._on_deadline)
        self._engine_id = self._session._generator.submit(start, self)  # noqa: SLF001

    def cancel(self) -> None:
        self._session._generator.cancel(self._engine_id)  # noqa: SLF001

    def abandon(self) -> None:
        """The stream is gone: stop the request, nobody hears its end."""
        self._forget()
        self.cancel()

    def _on_deadline(self) -> None:
        self._deadline_passed = True
        self.cancel()

    def _forget(self) -> None:
        self._session._slots.pop(self._number, None)  # noqa: SLF001
        if self._deadline:
            self._deadline.cancel()

    def _filled(self) -> _Columns:
        session = self._session
        columns = session._columns  # noqa: SLF001
        if not columns.filled:
            columns.filled = True
            session._wake.set()  # noqa: SLF001
        return columns

    # The token path: one call per request and engine step.
    def emit(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] = ()) -> None:
        columns = self._filled()
        columns.slots.append(self._number)
        columns.counts.append(len(token_ids))
        columns.token_ids += token_ids
        if logprobs:
            columns.logprobs.append(
                generation_pb2.SlotLogprobs(
                    slot=self._number, tokens=convert.logprobs_to_proto(logprobs)
                )
            )

    def finish(self, finish: Finish) -> None:
        if self._deadline_passed and finish.reason is FinishReason.CANCELLED:
            self.fail(DeadlinePassedError("the deadline passed; what was generated was sent"))
            return
        self._forget()
        self._filled().finishes.append(convert.finish_to_proto(self._number, finish))

    def fail(self, error: ServingError) -> None:
        self._forget()
        self._filled().errors.append(
            generation_pb2.SlotError(slot=self._number, error=convert.error_to_proto(error))
        )
