"""The Processor's end of the stream: one connection per worker, requests in slots, reconnection."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import grpc

from millstream.v1 import (
    decode_pb2,
    decode_pb2_grpc,
    generation_pb2,
    prefill_pb2,
    prefill_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)
from millstream_server.engines.base import EngineLoad, OutputSink, Role, TokenLogprob
from millstream_server.runtime.errors import WorkerLostError
from millstream_server.worker_stream import convert
from millstream_server.worker_stream.description import WorkerDescription, description_from_proto
from millstream_server.worker_stream.start import GenerationStart

logger = logging.getLogger(__name__)

_CHANNEL_OPTIONS = [
    ("grpc.max_receive_message_length", 32 << 20),  # frames that gathered while we were busy
    ("grpc.max_send_message_length", -1),
    # A peer that vanished without a word (node gone, no RST) is noticed in 15 s.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # A worker that comes back is taken back soon.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.use_local_subchannel_pool", 1),
]
_RETRY_S = 0.5
_INFO_TIMEOUT_S = 5.0


class WorkerConnection:
    """Keeps one stream to one worker open and runs requests on it.

    Call `run` once as a task; it reconnects until cancelled. While `description` is not None the
    worker takes requests.
    """

    def __init__(self, address: str, on_change: Callable[[], None]) -> None:
        """Talk to the worker at ``address``; ``on_change`` is called when it comes or goes."""
        self.address = address
        self.description: WorkerDescription | None = None
        self.load: EngineLoad | None = None
        self.in_flight = 0
        self._on_change = on_change
        self._sinks: list[OutputSink | None] = []
        self._free: list[int] = []
        self._outbox: deque[Any] = deque()
        self._outbox_filled = asyncio.Event()
        self._request_type: Any = None

    def start(self, start: GenerationStart, sink: OutputSink) -> Callable[[], None]:
        """Start a request; its output goes to ``sink``. Answers the function that cancels it.

        Cancelling may come at any time, also twice and after the end. The sink gets exactly one
        terminal call, whatever happens to the worker.

        Raises:
            WorkerLostError: the worker isn't connected.
        """
        if self.description is None:
            raise WorkerLostError("the worker just disconnected; retry")
        slot = self._free.pop() if self._free else len(self._sinks)
        if slot == len(self._sinks):
            self._sinks.append(None)
        self._sinks[slot] = sink
        self.in_flight += 1
        self._send(self._request_type(start=convert.start_to_proto(slot, start)))

        def cancel() -> None:
            if slot < len(self._sinks) and self._sinks[slot] is sink:
                self._send(self._request_type(cancel=generation_pb2.CancelGeneration(slot=slot)))

        return cancel

    async def run(self) -> None:
        """Connect, serve, reconnect; until cancelled."""
        async with grpc.aio.insecure_channel(self.address, options=_CHANNEL_OPTIONS) as channel:
            while True:
                try:
                    await self._serve(channel)
                except grpc.aio.AioRpcError as error:
                    logger.debug("worker=%s code=%s", self.address, error.code().name)
                except Exception:  # one frame we can't read must not lose the worker for good
                    logger.exception("worker=%s broke the stream's rules", self.address)
                await asyncio.sleep(_RETRY_S)

    async def _serve(self, channel: grpc.aio.Channel) -> None:
        """Live through one connection."""
        service = worker_pb2_grpc.WorkerServiceStub(channel)
        answer = await service.GetWorkerInfo(
            worker_pb2.GetWorkerInfoRequest(), timeout=_INFO_TIMEOUT_S, wait_for_ready=True
        )
        description = description_from_proto(answer.info)
        call, self._request_type = _open(channel, description.role)
        background = [
            asyncio.ensure_future(self._write(call)),
            asyncio.ensure_future(self._watch_load(service)),
        ]
        self.description = description
        logger.info(
            "worker=%s id=%s role=%s model=%s connected",
            self.address,
            description.worker_id,
            description.role.value,
            description.model,
        )
        self._on_change()
        try:
            while (response := await call.read()) is not grpc.aio.EOF:  # type: ignore[attr-defined]
                self._dispatch(response.frame)
        finally:
            for task in background:
                task.cancel()
            call.cancel()
            self._lose()

    async def _write(self, call: Any) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            while True:
                while self._outbox:
                    await call.write(self._outbox.popleft())
                self._outbox_filled.clear()
                await self._outbox_filled.wait()

    async def _watch_load(self, service: worker_pb2_grpc.WorkerServiceStub) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError):
            async for response in service.WatchLoad(worker_pb2.WatchLoadRequest()):
                load = response.load
                self.load = EngineLoad(
                    running_requests=load.running_requests,
                    queued_requests=load.queued_requests,
                    used_blocks=load.used_blocks,
                    total_blocks=load.total_blocks,
                )
        self.load = None  # rather none than an old one, which might keep requests away for good

    def _send(self, message: Any) -> None:
        self._outbox.append(message)
        self._outbox_filled.set()

    # The token path: once per frame, then once per entry.
    def _dispatch(self, frame: generation_pb2.StepFrame) -> None:
        sinks: Any = self._sinks
        token_ids = frame.token_ids
        if frame.logprobs:
            self._dispatch_with_logprobs(frame)
        elif not frame.token_counts:
            for slot, token in zip(frame.slots, token_ids, strict=True):
                sinks[slot].emit((token,))
        else:
            at = 0
            for slot, count in zip(frame.slots, frame.token_counts, strict=True):
                sinks[slot].emit(token_ids[at : at + count])
                at += count
        if frame.draining:
            self._take_no_more()
        # Converted first: what can't be read must not cost a slot its end.
        for finish in frame.finishes:
            end = convert.finish_from_proto(finish)
            self._release(finish.slot).finish(end)
        for failure in frame.errors:
            error = convert.error_from_proto(failure.error)
            self._release(failure.slot).fail(error)

    def _dispatch_with_logprobs(self, frame: generation_pb2.StepFrame) -> None:
        sinks: Any = self._sinks
        gathered: dict[int, list[TokenLogprob]] = {}
        for entry in frame.logprobs:
            gathered.setdefault(entry.slot, []).extend(convert.logprobs_from_proto(entry.tokens))
        columns: dict[int, Iterator[TokenLogprob]] = {
            slot: iter(entries) for slot, entries in gathered.items()
        }
        counts = frame.token_counts or [1] * len(frame.slots)
        at = 0
        for slot, count in zip(frame.slots, counts, strict=True):
            fresh = frame.token_ids[at : at + count]
            at += count
            own = columns.get(slot)
            sinks[slot].emit(fresh, [next(own) for _ in fresh] if own else ())

    def _release(self, slot: int) -> OutputSink:
        sink = self._sinks[slot]
        if sink is None:
            message = f"worker {self.address} ended slot {slot}, which is not in use"
            raise RuntimeError(message)
        self._sinks[slot] = None
        self._free.append(slot)
        self.in_flight -= 1
        return sink

    def _take_no_more(self) -> None:
        """The worker is shutting down: what runs there ends there, new requests go elsewhere."""
        if self.description:
            logger.info("worker=%s drains", self.address)
            self.description = None
            self._on_change()

    def _lose(self) -> None:
        """The stream is gone, and every request on it."""
        if self.description:
            logger.warning("worker=%s disconnected open_requests=%d", self.address, self.in_flight)
        self.description = None
        self.load = None
        sinks, self._sinks = self._sinks, []
        self._free.clear()
        self._outbox.clear()
        self.in_flight = 0
        self._on_change()
        for sink in sinks:
            if sink is not None:
                sink.fail(
                    WorkerLostError("the worker that ran this request went away; send it again")
                )


def _open(channel: grpc.aio.Channel, role: Role) -> tuple[Any, Any]:
    if role is Role.PREFILL:
        prefill: Any = prefill_pb2_grpc.PrefillServiceStub(channel).Prefill
        return prefill(), prefill_pb2.PrefillRequest
    decode: Any = decode_pb2_grpc.DecodeServiceStub(channel).Decode
    return decode(), decode_pb2.DecodeRequest
