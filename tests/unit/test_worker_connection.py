"""The Processor's end of the stream against a worker that does exactly what the test says."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any, cast

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from millstream.v1 import (
    decode_pb2,
    decode_pb2_grpc,
    errors_pb2,
    generation_pb2,
    usage_pb2,
    worker_pb2,
    worker_pb2_grpc,
)
from millstream_server.engines.base import Finish, FinishReason, Sampling, TokenLogprob
from millstream_server.runtime.errors import (
    KvTransferError,
    ServingError,
    UnavailableError,
    WorkerLostError,
)
from millstream_server.worker_stream import client
from millstream_server.worker_stream.client import WorkerConnection
from millstream_server.worker_stream.start import GenerationStart
from tests.support.waiting import EOF, until

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
START = GenerationStart(request_id="r", token_ids=[1], sampling=Sampling(max_new_tokens=4))


class Worker(worker_pb2_grpc.WorkerServiceServicer, decode_pb2_grpc.DecodeServiceServicer):
    """Answers with the frames that the test puts in."""

    def __init__(self) -> None:
        self.controls: list[decode_pb2.DecodeRequest] = []
        self.frames: asyncio.Queue[generation_pb2.StepFrame | None] = asyncio.Queue()
        self.connections = 0
        self.stop_watching = asyncio.Event()
        self.role = worker_pb2.WORKER_ROLE_AGGREGATED

    async def GetWorkerInfo(self, request: Any, context: Any) -> worker_pb2.GetWorkerInfoResponse:
        info = worker_pb2.WorkerInfo(role=self.role, model="m", vocab_size=9, context_length=9)
        return worker_pb2.GetWorkerInfoResponse(info=info)

    async def WatchLoad(
        self, request: Any, context: Any
    ) -> AsyncIterator[worker_pb2.WatchLoadResponse]:
        yield worker_pb2.WatchLoadResponse(load=worker_pb2.LoadReport(running_requests=99))
        await self.stop_watching.wait()

    async def Decode(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override]
        self.connections += 1
        reader = asyncio.ensure_future(self._read(context))
        try:
            while (frame := await self.frames.get()) is not None:
                await context.write(decode_pb2.DecodeResponse(frame=frame))
        finally:
            reader.cancel()

    async def _read(self, context: Any) -> None:
        while (control := await context.read()) is not EOF:
            self.controls.append(control)

    def send(self, **frame: Any) -> None:
        self.frames.put_nowait(generation_pb2.StepFrame(**frame))


class Sink:
    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.ends: list[Finish | ServingError] = []

    def emit(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] = ()) -> None:
        self.token_ids += token_ids
        self.logprobs += logprobs

    def finish(self, finish: Finish) -> None:
        self.ends.append(finish)

    def fail(self, error: ServingError) -> None:
        self.ends.append(error)


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """Says what the test puts in; None ends the Watch."""

    def __init__(self) -> None:
        self.watches = 0
        self.says: asyncio.Queue[int | None] = asyncio.Queue()

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[Any]:
        assert request.service == "millstream.v1.DecodeService"
        self.watches += 1
        while (status := await self.says.get()) is not None:
            yield health_pb2.HealthCheckResponse(status=status)
        await context.abort(grpc.StatusCode.UNAVAILABLE, "")


@contextlib.asynccontextmanager
async def connected(
    worker: Worker | None = None, health: Health | None = None
) -> AsyncIterator[tuple[Worker, WorkerConnection]]:
    worker, server = worker or Worker(), grpc.aio.server()
    if health:
        health_pb2_grpc.add_HealthServicer_to_server(health, server)
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(worker, server)
    decode_pb2_grpc.add_DecodeServiceServicer_to_server(worker, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    connection = WorkerConnection(f"127.0.0.1:{port}", lambda: None)
    running = asyncio.ensure_future(connection.run())
    try:
        await until(lambda: health is not None or connection.description is not None)
        yield worker, connection
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        await server.stop(0)


def _finish(slot: int) -> generation_pb2.SlotFinish:
    usage = usage_pb2.Usage(prompt_tokens=1, completion_tokens=2)
    reason = generation_pb2.FINISH_REASON_LENGTH
    return generation_pb2.SlotFinish(slot=slot, reason=reason, usage=usage)


async def test_tokens_go_to_the_slot_they_are_for_in_order() -> None:
    async with connected() as (worker, connection):
        a, b, c = Sink(), Sink(), Sink()
        for sink in (a, b, c):
            connection.start(START, sink)
        assert connection.in_flight == 3
        worker.send(slots=[2, 0], token_ids=[7, 8])
        worker.send(
            slots=[0, 1, 0], token_counts=[2, 1, 1], token_ids=[1, 2, 3, 4], finishes=[_finish(0)]
        )
        await until(lambda: bool(a.ends))
        assert (a.token_ids, b.token_ids, c.token_ids) == ([8, 1, 2, 4], [3], [7])
        (end,) = a.ends
        assert end == Finish(reason=FinishReason.LENGTH, prompt_tokens=1, completion_tokens=2)
        assert connection.in_flight == 2


async def test_logprobs_go_with_their_tokens_when_a_slot_has_several_entries() -> None:
    def columns(*ids: int) -> generation_pb2.TokenLogprobs:
        return generation_pb2.TokenLogprobs(token_ids=ids, logprobs=[-0.5] * len(ids))

    async with connected() as (worker, connection):
        a, b = Sink(), Sink()
        for sink in (a, b):
            connection.start(START, sink)
        worker.send(
            slots=[0, 1, 0],
            token_counts=[1, 1, 2],
            token_ids=[1, 2, 3, 4],
            logprobs=[
                generation_pb2.SlotLogprobs(slot=0, tokens=columns(1)),
                generation_pb2.SlotLogprobs(slot=0, tokens=columns(3, 4)),
            ],
        )
        await until(lambda: len(a.token_ids) == 3)
        assert [entry.token_id for entry in a.logprobs] == a.token_ids == [1, 3, 4]
        assert b.token_ids == [2]
        assert b.logprobs == []


async def test_a_slot_is_used_again_only_after_its_end() -> None:
    async with connected() as (worker, connection):
        first, second, third = Sink(), Sink(), Sink()
        connection.start(START, first)
        connection.start(START, second)
        error = errors_pb2.RequestError(
            code=14, reason=errors_pb2.ERROR_REASON_KV_TRANSFER_FAILED, message="m", retryable=True
        )
        worker.send(errors=[generation_pb2.SlotError(slot=0, error=error)])
        await until(lambda: bool(first.ends))
        assert isinstance(first.ends[0], KvTransferError)
        connection.start(START, third)
        await until(lambda: len(worker.controls) == 3)
        assert [control.start.slot for control in worker.controls] == [0, 1, 0]


async def test_cancel_is_sent_while_the_request_is_open_and_never_for_its_successor() -> None:
    async with connected() as (worker, connection):
        first, second = Sink(), Sink()
        cancel_first = connection.start(START, first)
        assert connection.in_use == 1
        for _ in range(20):
            cancel_first()
        assert (connection.in_flight, connection.in_use) == (1, 0)
        worker.send(finishes=[_finish(0)])
        await until(lambda: bool(first.ends))
        connection.start(START, second)
        cancel_first()
        connection.start(START, Sink())
        await until(lambda: len(worker.controls) == 4)
        kinds = [control.WhichOneof("control") for control in worker.controls]
        assert kinds == ["start", "cancel", "start", "start"]
        assert connection.in_use == 2


@pytest.mark.parametrize(
    "broken",
    [
        {"finishes": [_finish(5)]},
        {"slots": [5], "token_ids": [1]},
        {"slots": [0], "token_ids": [1, 2]},
        {"slots": [0], "token_ids": [1], "token_counts": [1, 1]},
        {"finishes": [generation_pb2.SlotFinish(slot=0)]},
    ],
)
async def test_a_worker_that_breaks_the_rules_loses_its_requests_and_is_tried_again(
    broken: dict[str, Any],
) -> None:
    async with connected() as (worker, connection):
        lost = Sink()
        connection.start(START, lost)
        worker.send(**broken)
        await until(lambda: worker.connections == 2)
        (end,) = lost.ends
        assert isinstance(end, WorkerLostError)
        await until(lambda: connection.description is not None)
        assert connection.in_flight == 0
        again = Sink()
        connection.start(START, again)
        worker.send(slots=[0], token_ids=[3])
        await until(lambda: again.token_ids == [3])


async def test_a_draining_worker_gets_no_new_requests_and_finishes_its_own() -> None:
    async with connected() as (worker, connection):
        running = Sink()
        connection.start(START, running)
        worker.send(draining=True)
        await until(lambda: connection.description is None)
        with pytest.raises(WorkerLostError):
            connection.start(START, Sink())
        worker.send(slots=[0], token_ids=[3], finishes=[_finish(0)])
        await until(lambda: bool(running.ends))
        assert running.token_ids == [3]
        assert isinstance(running.ends[0], Finish)


async def test_a_stream_that_ends_loses_its_requests() -> None:
    async with connected() as (worker, connection):
        sinks = [Sink() for _ in range(3)]
        for sink in sinks:
            connection.start(START, sink)
        worker.frames.put_nowait(None)
        await until(lambda: all(sink.ends for sink in sinks))
        assert connection.description is None
        assert all(isinstance(sink.ends[0], WorkerLostError) for sink in sinks)
        with pytest.raises(UnavailableError):
            connection.start(START, Sink())
        await until(lambda: worker.connections == 2)
        assert [len(sink.ends) for sink in sinks] == [1, 1, 1]


async def test_slots_are_counted_afresh_after_a_loss() -> None:
    async with connected() as (worker, connection):
        for _ in range(3):
            connection.start(START, Sink())
        worker.send(finishes=[_finish(1)])
        await until(lambda: connection.in_flight == 2)
        worker.frames.put_nowait(None)
        await until(lambda: worker.connections == 2 and connection.description is not None)
        sent = len(worker.controls)
        for _ in range(3):
            connection.start(START, Sink())
        await until(lambda: len(worker.controls) == sent + 3)
        assert [control.start.slot for control in worker.controls[sent:]] == [0, 1, 2]


async def test_a_load_that_is_no_longer_reported_is_forgotten_and_asked_for_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client, "_RETRY_S", 0.1)
    async with connected() as (worker, connection):
        await until(lambda: connection.load is not None)
        assert connection.load is not None
        assert connection.load.running_requests == 99
        worker.stop_watching.set()
        await until(lambda: connection.load is None)
        worker.stop_watching.clear()
        await until(lambda: connection.load is not None)
        assert connection.description is not None
        assert worker.connections == 1


# ---- health


async def test_a_worker_gets_requests_only_while_it_says_that_it_serves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client, "_RETRY_S", 0.01)
    health = Health()
    async with connected(health=health) as (worker, connection):
        await until(lambda: bool(worker.connections and health.watches))
        assert connection.description is None, "before it has said anything"
        health.says.put_nowait(NOT_SERVING)
        await until(health.says.empty)
        assert connection.description is None
        health.says.put_nowait(SERVING)
        await until(lambda: connection.description is not None)
        health.says.put_nowait(NOT_SERVING)
        await until(lambda: connection.description is None)
        health.says.put_nowait(None)
        await until(lambda: health.watches == 2)
        assert connection.description is None
        health.says.put_nowait(SERVING)
        await until(lambda: connection.description is not None)
        health.says.put_nowait(None)
        await until(lambda: health.watches == 3)
        assert connection.description is not None, "what it said last holds"
        assert worker.connections == 1


class Mumbling(Worker):
    """Reports its load when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.speaks = asyncio.Event()

    async def WatchLoad(
        self, request: Any, context: Any
    ) -> AsyncIterator[worker_pb2.WatchLoadResponse]:
        while not self.stop_watching.is_set():
            yield worker_pb2.WatchLoadResponse(load=worker_pb2.LoadReport())
            await self.speaks.wait()
            self.speaks.clear()


async def test_a_worker_that_falls_silent_gets_nothing_until_it_speaks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its pings are answered by gRPC's threads, even while its event loop hangs."""
    monkeypatch.setattr(client, "_SILENCE_S", 0.2)
    mumbling = Mumbling()
    async with connected(mumbling) as (worker, connection):
        running = Sink()
        connection.start(START, running)
        await until(lambda: connection.description is None)
        assert connection.in_flight == 1
        mumbling.speaks.set()
        await until(lambda: connection.description is not None)
        await until(lambda: connection.description is None)
        mumbling.stop_watching.set()
        mumbling.speaks.set()
        await until(lambda: connection.description is not None)
        worker.send(finishes=[_finish(0)])
        await until(lambda: bool(running.ends))
        assert worker.connections == 1


# ---- accidents


class Clumsy(Sink):
    """Fails to take its end."""

    def finish(self, finish: Finish) -> None:
        super().finish(finish)
        raise RuntimeError

    def fail(self, error: ServingError) -> None:
        super().fail(error)
        raise RuntimeError


async def test_a_sink_that_breaks_costs_the_others_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with connected() as (worker, connection):
        ended, lost, other = Clumsy(), Clumsy(), Sink()
        for sink in (ended, lost, other):
            connection.start(START, sink)
        worker.send(slots=[2], token_ids=[7], finishes=[_finish(0)])
        await until(lambda: bool(ended.ends))
        assert connection.description is not None
        worker.frames.put_nowait(None)
        await until(lambda: bool(other.ends))
        assert isinstance(lost.ends[0], WorkerLostError)
        assert isinstance(other.ends[0], WorkerLostError)
        assert caplog.text.count("a request's end failed") == 2


async def test_a_request_that_cannot_be_written_takes_no_slot() -> None:
    async with connected() as (worker, connection):
        with pytest.raises(TypeError):
            connection.start(replace(START, token_ids=cast("Any", ["x"])), Sink())
        assert (connection.in_flight, connection.in_use) == (0, 0)
        sink = Sink()
        connection.start(START, sink)
        await until(lambda: bool(worker.controls))
        assert [control.start.slot for control in worker.controls] == [0]
        worker.frames.put_nowait(None)
        await until(lambda: bool(sink.ends))
