"""A worker that does exactly what the test tells it, and a link to it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from millstream.v1 import (
    decode_pb2,
    decode_pb2_grpc,
    generation_pb2,
    usage_pb2,
    worker_pb2,
    worker_pb2_grpc,
)
from millstream_server.generation.output import Finish, TokenLogprob
from millstream_server.generation.request import GenerationRequest, Prompt
from millstream_server.generation.sampling import Sampling
from millstream_server.links.generation_stream import OpenGeneration
from millstream_server.links.grpc_channel import GrpcChannel
from millstream_server.links.link import WorkerLink
from millstream_server.runtime.errors import ServingError
from millstream_testing.waiting import EOF, until
from tests.support.worker.without_optional_rpcs import WorkerWithoutOptionalRpcs

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
REQUEST = GenerationRequest(request_id="r", prompt=Prompt([1]), sampling=Sampling(max_new_tokens=4))


class PlayedWorker(WorkerWithoutOptionalRpcs, decode_pb2_grpc.DecodeServiceServicer):
    """Sends the frames that the test puts in."""

    def __init__(self) -> None:
        self.controls: list[decode_pb2.DecodeRequest] = []
        self.frames: asyncio.Queue[generation_pb2.StepFrame | None] = asyncio.Queue()
        self.connections = 0
        self.half_closed = asyncio.Event()
        """The caller will start nothing more."""
        self.stop_watching = asyncio.Event()
        self.role = worker_pb2.WORKER_ROLE_AGGREGATED

    async def GetWorkerInfo(self, request: Any, context: Any) -> worker_pb2.GetWorkerInfoResponse:
        info = worker_pb2.WorkerInfo(
            role=self.role, model="m", vocab_size=9, context_length=9, max_running_requests=4
        )
        return worker_pb2.GetWorkerInfoResponse(info=info)

    async def WatchWorkerInfo(self, request: Any, context: Any) -> AsyncIterator[Any]:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "not served here")
        yield

    async def WatchLoad(
        self, request: Any, context: Any
    ) -> AsyncIterator[worker_pb2.WatchLoadResponse]:
        yield worker_pb2.WatchLoadResponse(load=worker_pb2.LoadReport(running_requests=99))
        await self.stop_watching.wait()

    async def Decode(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override]
        self.connections += 1
        self.half_closed.clear()
        reader = asyncio.ensure_future(self._read(context))
        try:
            while (frame := await self.frames.get()) is not None:
                await context.write(decode_pb2.DecodeResponse(frame=frame))
        finally:
            reader.cancel()

    async def _read(self, context: Any) -> None:
        while (control := await context.read()) is not EOF:
            self.controls.append(control)
        self.half_closed.set()

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
    """Reports what the test puts in; None ends the Watch."""

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
async def serving(worker: PlayedWorker, health: Health | None = None) -> AsyncIterator[str]:
    """Serve a worker; yields its address."""
    server = grpc.aio.server()
    if health:
        health_pb2_grpc.add_HealthServicer_to_server(health, server)
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(worker, server)
    decode_pb2_grpc.add_DecodeServiceServicer_to_server(worker, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


@contextlib.asynccontextmanager
async def linked(
    worker: PlayedWorker | None = None, health: Health | None = None
) -> AsyncIterator[tuple[PlayedWorker, WorkerLink]]:
    """Link to a worker; without ``health`` wait until it takes requests."""
    worker = worker or PlayedWorker()
    async with serving(worker, health) as address:
        link = WorkerLink(address, GrpcChannel, lambda: None)
        running = asyncio.ensure_future(link.run())
        try:
            await until(lambda: health is not None or link.view.description is not None)
            yield worker, link
        finally:
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running


def start(link: WorkerLink, sink: Sink, request: GenerationRequest = REQUEST) -> OpenGeneration:
    """Start a request as `Fleet.generate` does."""
    assert link.streams is not None
    assert link.streams.text is not None
    return link.streams.text.start(request, sink)


def finish(slot: int) -> generation_pb2.SlotFinish:
    """Make the good end of a request."""
    usage = usage_pb2.GenerationUsage(prompt_tokens=1, completion_tokens=2)
    reason = generation_pb2.FINISH_REASON_LENGTH
    return generation_pb2.SlotFinish(slot=slot, reason=reason, usage=usage)
