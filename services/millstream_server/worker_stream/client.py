"""The Processor's end of the stream: one connection per worker, requests in slots, reconnection."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

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
from millstream_server.runtime.channel import channel_options, open_channel
from millstream_server.runtime.errors import WorkerLostError
from millstream_server.runtime.metrics import WORKERS_CONNECTED
from millstream_server.runtime.rpc_client_telemetry import observe_call, unary_client_interceptors
from millstream_server.runtime.tls import ClientTls
from millstream_server.runtime.tracing import Tracing
from millstream_server.worker_stream import convert
from millstream_server.worker_stream.description import WorkerDescription, description_from_proto
from millstream_server.worker_stream.start import GenerationStart
from millstream_server.worker_stream.stream_metrics import StreamMetrics, stream_metrics

logger = logging.getLogger(__name__)

# Frames gather while we are busy, so they may be large.
_CHANNEL_OPTIONS = channel_options(max_receive_bytes=32 << 20)
_RETRY_S = 0.5
_INFO_TIMEOUT_S = 5.0
_SILENCE_S = 30.0
"""A worker reports its load every 10 s at least; one that misses three reports is stuck."""
_SERVICES = {
    Role.PREFILL: "millstream.v1.PrefillService",
    Role.DECODE: "millstream.v1.DecodeService",
    Role.AGGREGATED: "millstream.v1.DecodeService",
}


class WorkerConnection:
    """Keeps one stream to one worker open and runs requests on it.

    Call `run` once as a task; it reconnects until cancelled. While `description` is not None the
    worker takes requests.
    """

    def __init__(
        self,
        address: str,
        on_change: Callable[[], None],
        *,
        tls: ClientTls | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        """Talk to the worker at ``address``; ``on_change`` is called when it comes or goes."""
        self.address = address
        self.description: WorkerDescription | None = None
        self._connected: WorkerDescription | None = None
        self._drains = False
        self._healthy = False
        self._silent = False
        self._tls = tls
        self.load: EngineLoad | None = None
        self.in_flight = 0
        self._on_change = on_change
        self._sinks: list[OutputSink | None] = []
        self._free: list[int] = []
        self._cancelled: set[int] = set()
        self._outbox: deque[Any] = deque()
        self._outbox_filled = asyncio.Event()
        self._request_type: Any = None
        self._tracing = tracing
        self._metrics: StreamMetrics = stream_metrics(Role.AGGREGATED)  # until its role is known

    def start(self, start: GenerationStart, sink: OutputSink) -> Callable[[], None]:
        """Start a request; its output goes to ``sink``. Answers the function that cancels it.

        Cancelling may come at any time, also twice and after the end. The sink gets exactly one
        terminal call, whatever happens to the worker.

        Raises:
            WorkerLostError: the worker isn't connected.
        """
        if self.description is None:
            raise WorkerLostError("the worker just disconnected; retry")
        slot = self._free[-1] if self._free else len(self._sinks)
        # Made first: what can't be written must not take a slot.
        message = self._request_type(start=convert.start_to_proto(slot, start))
        if self._free:
            self._sinks[self._free.pop()] = sink
        else:
            self._sinks.append(sink)
        self.in_flight += 1
        self._metrics.begun()
        self._send(message)

        def cancel() -> None:
            open_ = slot < len(self._sinks) and self._sinks[slot] is sink
            if open_ and slot not in self._cancelled:
                self._cancelled.add(slot)
                self._send(self._request_type(cancel=generation_pb2.CancelGeneration(slot=slot)))

        return cancel

    @property
    def in_use(self) -> int:
        """Requests that somebody still wants: in flight and not cancelled."""
        return self.in_flight - len(self._cancelled)

    async def run(self) -> None:
        """Connect, serve, reconnect; until cancelled. New certificates take a new channel."""
        while True:
            async with open_channel(
                self.address,
                self._tls,
                options=_CHANNEL_OPTIONS,
                interceptors=unary_client_interceptors(self._tracing, self.address),
            ) as channel:
                while not (self._tls and self._tls.changed()):
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
            asyncio.ensure_future(self._watch_health(channel, description.role)),
        ]
        self._connected, self._drains = description, False
        self._healthy = self._silent = False  # not a worker for requests until it says so
        self._metrics = stream_metrics(description.role)
        logger.info(
            "worker=%s id=%s role=%s model=%s connected",
            self.address,
            description.worker_id,
            description.role.value,
            description.model,
        )
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
                if self._drains and not self.in_flight:
                    await call.done_writing()  # the worker waits for this before it leaves
                    return
                self._outbox_filled.clear()
                await self._outbox_filled.wait()

    async def _watch_load(self, service: worker_pb2_grpc.WorkerServiceStub) -> None:
        while True:
            try:
                watch: Any = service.WatchLoad(worker_pb2.WatchLoadRequest())
                observe_call(watch, "millstream.v1.WorkerService/WatchLoad")
                with self._listening() as heard:
                    async for response in watch:
                        load = response.load
                        self.load = EngineLoad(
                            running_requests=load.running_requests,
                            queued_requests=load.queued_requests,
                            used_blocks=load.used_blocks,
                            total_blocks=load.total_blocks,
                        )
                        heard()
            except grpc.aio.AioRpcError as error:
                logger.debug("worker=%s load watch code=%s", self.address, error.code().name)
            finally:
                self.load = None  # rather none than an old one, which might keep requests away
            await asyncio.sleep(_RETRY_S)

    @contextlib.contextmanager
    def _listening(self) -> Iterator[Callable[[], None]]:
        """Notice a worker that has stopped talking; answers what to call when it talks.

        gRPC's own threads answer pings, so a process whose event loop hangs looks alive.
        """
        loop = asyncio.get_running_loop()
        missed = functools.partial(self._hears, silence=True)
        timer = loop.call_later(_SILENCE_S, missed)

        def heard() -> None:
            nonlocal timer
            timer.cancel()
            timer = loop.call_later(_SILENCE_S, missed)
            self._hears(silence=False)

        try:
            yield heard
        finally:
            timer.cancel()
            self._hears(silence=False)  # nobody listens any more

    def _hears(self, *, silence: bool) -> None:
        if silence is not self._silent:
            logger.warning("worker=%s silent=%s", self.address, str(silence).lower())
            self._silent = silence
            self._update()

    async def _watch_health(self, channel: grpc.aio.Channel, role: Role) -> None:
        """A worker whose engine is stuck gets nothing new until it has recovered.

        When the Watch ends, what it said last holds until the next one answers.
        """
        request = health_pb2.HealthCheckRequest(service=_SERVICES[role])
        while True:
            try:
                async for answer in health_pb2_grpc.HealthStub(channel).Watch(request):
                    self._serves(serving=answer.status == health_pb2.HealthCheckResponse.SERVING)
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.UNIMPLEMENTED:  # it doesn't tell
                    self._serves(serving=True)
                    return
                logger.debug("worker=%s health watch code=%s", self.address, error.code().name)
            await asyncio.sleep(_RETRY_S)

    def _serves(self, *, serving: bool) -> None:
        if serving is not self._healthy:
            logger.info("worker=%s serving=%s", self.address, str(serving).lower())
            self._healthy = serving
            self._update()

    def _send(self, message: Any) -> None:
        self._outbox.append(message)
        self._outbox_filled.set()

    # The token path: once per frame, then once per entry.
    def _dispatch(self, frame: generation_pb2.StepFrame) -> None:
        sinks: Any = self._sinks
        token_ids = frame.token_ids
        self._metrics.frame(len(token_ids))
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
            self._end(functools.partial(self._release(finish.slot).finish, end), end.reason.name)
        for failure in frame.errors:
            error = convert.error_from_proto(failure.error)
            self._end(functools.partial(self._release(failure.slot).fail, error), error.reason)

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

    def _end(self, report: Callable[[], None], outcome: str) -> None:
        """Tell a sink its end."""
        try:
            report()
        except Exception:  # one request's accident must not end the others on this stream
            logger.exception("worker=%s outcome=%s a request's end failed", self.address, outcome)
        self._metrics.ended(outcome)

    def _release(self, slot: int) -> OutputSink:
        sink = self._sinks[slot]
        if sink is None:
            message = f"worker {self.address} ended slot {slot}, which is not in use"
            raise RuntimeError(message)
        self._sinks[slot] = None
        self._free.append(slot)
        self._cancelled.discard(slot)
        self.in_flight -= 1
        if self._drains:
            self._outbox_filled.set()
        return sink

    def _take_no_more(self) -> None:
        """The worker is shutting down: what runs there ends there, new requests go elsewhere."""
        if not self._drains:
            logger.info("worker=%s drains", self.address)
            self._drains = True
            self._outbox_filled.set()
            self._update()

    def _lose(self) -> None:
        """The stream is gone, and every request on it."""
        task = asyncio.current_task()
        if not self._drains:
            logger.warning("worker=%s disconnected open_requests=%d", self.address, self.in_flight)
            if not (task and task.cancelling()):  # else it is this process that leaves
                self._metrics.workers_lost.inc()
        self._connected = None
        self.load = None
        sinks, self._sinks = self._sinks, []
        self._free.clear()
        self._cancelled.clear()
        self._outbox.clear()
        self.in_flight = 0
        self._update()
        for sink in sinks:
            if sink is not None:
                lost = WorkerLostError("the worker that ran this request went away; send it again")
                self._end(functools.partial(sink.fail, lost), lost.reason)

    def _update(self) -> None:
        """Bring `description` up to date: is this worker one for new requests?"""
        fit = self._healthy and not self._silent and not self._drains
        now = self._connected if fit else None
        before, self.description = self.description, now
        if before is now:
            return
        for description, count in ((before, -1), (now, 1)):
            if description is not None:
                WORKERS_CONNECTED.labels(description.model, description.role.value).inc(count)
        self._on_change()


def _open(channel: grpc.aio.Channel, role: Role) -> tuple[Any, Any]:
    """Open the worker's stream; answers the call and the type of its requests."""
    if role is Role.PREFILL:
        prefill: Any = prefill_pb2_grpc.PrefillServiceStub(channel).Prefill
        return _observed(prefill(), role, "Prefill"), prefill_pb2.PrefillRequest
    decode: Any = decode_pb2_grpc.DecodeServiceStub(channel).Decode
    return _observed(decode(), role, "Decode"), decode_pb2.DecodeRequest


def _observed(call: Any, role: Role, method: str) -> Any:
    observe_call(call, f"{_SERVICES[role]}/{method}")
    return call
