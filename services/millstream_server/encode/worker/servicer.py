"""EncodeService: its streams, and the plan of a worker with it alone or beside another service."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import replace
from typing import Generic

from prometheus_client.core import Metric

from millstream.v1 import encode_pb2, encode_pb2_grpc, worker_pb2
from millstream_server.control.engine import Role, WorkerDescription
from millstream_server.encode.encoder import EncoderInfo
from millstream_server.encode.fetching.serve import EmbeddingServer, Sender
from millstream_server.encode.transfer.store import Leases
from millstream_server.encode.wire import file_from_proto
from millstream_server.encode.worker.core import (
    EncodeOptions,
    EncodeRequest,
    EncodeWorker,
    ItemUpload,
    LeasedItem,
)
from millstream_server.encode.worker.pipeline import HostedEncoder
from millstream_server.protobuf.errors import error_to_proto
from millstream_server.protobuf.media import ref_to_proto
from millstream_server.runtime.drain import OpenWork
from millstream_server.runtime.errors import (
    InvalidRequestError,
    ServingError,
    UnsupportedFeatureError,
)
from millstream_server.runtime.rpc.call import Call
from millstream_server.runtime.rpc.serving import ServicerTable
from millstream_server.runtime.rpc.slot_session import (
    CancelSlot,
    SlotContent,
    SlotSession,
    StartSlot,
    TellSlot,
)
from millstream_server.runtime.telemetry.trace_context import TraceContext
from millstream_server.worker.host import HostedEngine, InfoT, WorkerHost, WorkerPlan, WrappedEngine
from millstream_server.worker.open_requests import (
    DEFAULT_TIMES,
    Described,
    OpenLimits,
    OpenRequests,
)
from millstream_server.worker_info import description_to_proto

SERVICE = "millstream.v1.EncodeService"
STREAM = f"{SERVICE}/Encode"


class _Stream:
    """The `SlotService` of one stream; it owns the leases of its results."""

    def __init__(self, worker: EncodeWorker) -> None:
        self.work = worker.work
        self.streams = worker.streams
        self.run = worker.run
        self._worker = worker

    def control(
        self, message: encode_pb2.EncodeRequest
    ) -> StartSlot[EncodeRequest] | TellSlot[EncodeRequest] | CancelSlot | None:
        match message.WhichOneof("control"):
            case "start":
                start = message.start
                return StartSlot(start.slot, lambda trace: self._read(start, trace))
            case "more":
                # Bytes of a slot that has just failed may still be on their way: no error.
                more = message.more
                return TellSlot(more.slot, lambda item: item.upload.more(more.data))
            case "cancel":
                return CancelSlot(message.cancel.slot)
            case "release":
                self._worker.leases.release(message.release.lease)
                return None
            case _:
                raise InvalidRequestError.of("control", "set one of start, more, cancel, release")

    def _read(self, start: encode_pb2.EncodeItem, trace: TraceContext) -> EncodeRequest:
        file = file_from_proto(start, trace)
        upload = ItemUpload(start.total_bytes, file.data, self._worker.upload_idle_s)
        return EncodeRequest(file, upload, self)

    def response(self, content: SlotContent[None, LeasedItem]) -> encode_pb2.EncodeResponse:
        return encode_pb2.EncodeResponse(
            encoded=[
                encode_pb2.EncodedItem(
                    slot=slot, ref=ref_to_proto(leased.item, leased.lease.left_s)
                )
                for slot, leased in content.finished
            ],
            errors=[
                encode_pb2.EncodeError(slot=slot, error=error_to_proto(error))
                for slot, error in content.errors
            ],
            wanted=[slot for slot, _ in content.latest],
            draining=content.draining,
        )


class EncodeServicer(encode_pb2_grpc.EncodeServiceServicer):
    """Serves EncodeService from one encoder."""

    def __init__(self, worker: EncodeWorker, embeddings: EmbeddingServer | None) -> None:
        """Encode items on ``worker``; ``embeddings`` hands results out, None: nobody gets any."""
        self._worker = worker
        self._embeddings = embeddings

    async def Encode(
        self, request_iterator: AsyncIterator[encode_pb2.EncodeRequest], call: Call
    ) -> AsyncIterator[encode_pb2.EncodeResponse]:
        stream = _Stream(self._worker)
        session = SlotSession(stream)
        try:
            async with contextlib.aclosing(session.responses(request_iterator)) as responses:
                async for response in responses:
                    yield response
        finally:
            self._worker.leases.release_all(stream)

    async def Fetch(
        self, request_iterator: AsyncIterator[encode_pb2.FetchRequest], call: Call
    ) -> AsyncIterator[encode_pb2.FetchResponse]:
        """Hand one result out; a drain waits for it."""
        if self._embeddings is None:
            raise UnsupportedFeatureError(
                "this worker encodes for its own prompts only: nobody else can fetch its results"
            )
        with self._worker.work.track():
            responses = self._embeddings.fetch(request_iterator, call)
            async with contextlib.aclosing(responses):
                async for response in responses:
                    yield response


def make_plan(engine: HostedEncoder, model: str, options: EncodeOptions) -> WorkerPlan[EncoderInfo]:
    """Make the plan of a worker of the role ENCODE."""

    def add(host: WorkerHost[EncoderInfo], server: ServicerTable) -> None:
        add_service(server, engine, host.requests, host.streams, options)

    return WorkerPlan(
        engine=engine,
        role=Role.ENCODE,
        model=model,
        operation="encode",
        services=(SERVICE,),
        add=add,
        describe=description_to_proto,
        without_spans=(STREAM,),
    )


def add_service(
    server: ServicerTable,
    engine: HostedEncoder,
    requests: OpenRequests,
    streams: OpenWork,
    options: EncodeOptions,
) -> EncodeWorker:
    """Add EncodeService to ``server``; ``engine`` closes what it needs."""
    worker = EncodeWorker(engine, requests, streams, options)
    embeddings: EmbeddingServer | None = None
    if options.tickets is not None:
        sender = Sender(engine.store, options.transfer)
        embeddings = EmbeddingServer(worker.leases, options.tickets, sender)
    engine.before_store_closes = worker.leases.close
    servicer = EncodeServicer(worker, embeddings)
    encode_pb2_grpc.add_EncodeServiceServicer_to_server(servicer, server)
    return worker


def with_encoding(
    plan: WorkerPlan[InfoT],
    encoder: HostedEncoder,
    options: EncodeOptions,
    on_leases: Callable[[Leases], None] = lambda _: None,
) -> WorkerPlan[InfoT]:
    """Return ``plan`` with EncodeService added.

    ``on_leases`` gets the leases when the services are added, before ``plan`` adds its own: the
    other service reads results from them without a fetch.
    """
    engines = _Engines(plan.engine, encoder)

    def add(host: WorkerHost[InfoT], server: ServicerTable) -> None:
        described = Described("encode", Role.ENCODE, plan.model)
        requests = OpenRequests(host.work, described, host.tracing, lambda: 0.0)
        engines.requests = requests
        worker = add_service(server, encoder, requests, host.streams, options)
        on_leases(worker.leases)
        plan.add(host, server)

    def describe(description: WorkerDescription) -> worker_pb2.WorkerInfo:
        return plan.describe(replace(description, encoder=encoder.info))

    return replace(
        plan,
        engine=engines,
        services=(*plan.services, SERVICE),
        add=add,
        describe=describe,
        without_spans=(*plan.without_spans, STREAM),
    )


class _Engines(WrappedEngine, Generic[InfoT]):
    """Two engines as one, described by the main one.

    Its load and progress are the main one's: progress of one must not hide that the other hangs.
    """

    def __init__(self, main: HostedEngine[InfoT], encoder: HostedEncoder) -> None:
        super().__init__(main)
        self.requests: OpenRequests | None = None
        self._main = main
        self._encoder = encoder

    async def start(self, on_failure: Callable[[ServingError], None]) -> InfoT:
        """Start the main one first: it may take all that is left of a GPU's memory."""
        main_info = await self._main.start(on_failure)
        info = await self._encoder.start(on_failure)
        if self.requests is not None:
            most = DEFAULT_TIMES * info.max_running_requests
            self.requests.limits = OpenLimits(max_requests=most)
        return main_info

    async def warm_up(self) -> None:
        await self._main.warm_up()
        await self._encoder.warm_up()

    async def close(self) -> None:
        try:
            await self._encoder.close()
        finally:
            await self._main.close()

    async def probe(self, dp_rank: int) -> None:
        probes = [self._main.probe(dp_rank)]
        if dp_rank == 0:
            probes.append(self._encoder.probe(0))
        await asyncio.gather(*probes)

    def metrics(self) -> Iterable[Metric]:
        return (*super().metrics(), *self._encoder.metrics())
