"""EncodeService on a worker's server, and a worker that has nothing else."""

from __future__ import annotations

from dataclasses import dataclass, field

from millstream.v1 import encode_pb2_grpc
from millstream_server.encoding.encoder import EncoderInfo
from millstream_server.engines.base import Role
from millstream_server.protobuf.worker import description_to_proto
from millstream_server.runtime.lifecycle.drain import OpenWork
from millstream_server.runtime.rpc.serving import ServicerTable
from millstream_server.transfer.embeddings.sender import Sender
from millstream_server.transfer.embeddings.settings import Transfer
from millstream_server.transfer.embeddings.ticket import EmbeddingTickets
from millstream_server.worker.embeddings.serve import EmbeddingServer
from millstream_server.worker.encoding.core import EncodeOptions, EncodeWorker
from millstream_server.worker.encoding.engine import HostedEncoder
from millstream_server.worker.encoding.servicer import SERVICE, STREAM, EncodeServicer
from millstream_server.worker.host import WorkerHost, WorkerPlan
from millstream_server.worker.open_requests import OpenRequests


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """How EncodeService serves."""

    options: EncodeOptions = field(default_factory=EncodeOptions)
    tickets: EmbeddingTickets | None = None
    """Checks who may fetch; None: nobody may, the results are for this process itself."""
    transfer: Transfer = Transfer.AUTO


def make_plan(engine: HostedEncoder, model: str, serving: Serving) -> WorkerPlan[EncoderInfo]:
    """Make the plan of a worker of the role ENCODE."""

    def add(host: WorkerHost[EncoderInfo], server: ServicerTable) -> None:
        add_service(server, engine, host.requests, host.streams, serving)

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
    serving: Serving,
) -> EncodeWorker:
    """Add EncodeService to ``server``; ``engine`` closes what it needs."""
    worker = EncodeWorker(engine, requests, streams, serving.options)
    embeddings: EmbeddingServer | None = None
    if serving.tickets is not None:
        sender = Sender(engine.store, serving.transfer)
        embeddings = EmbeddingServer(worker.leases, serving.tickets, sender)
        engine.when_closing(embeddings.close)
    engine.when_closing(worker.leases.close)
    servicer = EncodeServicer(worker, embeddings)
    encode_pb2_grpc.add_EncodeServiceServicer_to_server(servicer, server)
    return worker
