"""A worker that holds embeddings and serves EncodeService.Fetch only, on a real socket."""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from millstream.v1 import encode_pb2, encode_pb2_grpc
from millstream_server.encode.fetching.serve import EmbeddingServer, Sender
from millstream_server.encode.transfer import shared_memory
from millstream_server.encode.transfer.settings import Transfer
from millstream_server.encode.transfer.shared_memory import FOLDER
from millstream_server.encode.transfer.store import EmbeddingStore, Leases
from millstream_server.encode.transfer.ticket import EmbeddingTickets
from millstream_server.generation.ticket import TicketKey
from millstream_server.media.items import Content, EmbeddingTicket, EncodedItem, Geometry, Modality
from millstream_server.media.tensor import ElementType, Tensor, TensorSpec
from millstream_server.protobuf.media import ticket_to_proto
from millstream_server.runtime.lifecycle.server import Server, ServerOptions
from millstream_server.runtime.security.tls import ServerTls
from millstream_server.runtime.telemetry.metrics import EMBEDDING_TRANSFERS
from millstream_server.runtime.telemetry.tracing import Tracing

SERVICE = "millstream.v1.EncodeService"
TICKETS = EmbeddingTickets(TicketKey(bytes(range(32))))
OWNER = "a stream"


def pattern(nbytes: int) -> bytes:
    """The bytes of the tensor of this size, different for each."""
    return random.Random(nbytes).randbytes(nbytes)


def spec_of(nbytes: int) -> TensorSpec:
    """Describe a tensor of this size."""
    if nbytes % 64:
        return TensorSpec(ElementType.BFLOAT16, (nbytes // 2,))
    return TensorSpec(ElementType.FLOAT32, (nbytes // 64, 16))


def names_in_shared_memory(pids: Iterable[int] | None = None) -> set[str]:
    """Return the names in /dev/shm that a killed process has left, or that one of ``pids`` has.

    Without ``pids`` this process counts. Names of others belong to tests that run beside this one.
    """
    ours: set[str] = set()
    for pid in (os.getpid(),) if pids is None else pids:
        for link in Path(f"/proc/{pid}/fd").glob("*"):
            with contextlib.suppress(OSError):  # closed, or ended, while we looked
                ours.add(str(link.readlink()))
    rows = [row.split() for row in Path("/proc/net/unix").read_text().splitlines()]
    inodes = {row[7]: row[6] for row in rows if len(row) > 7}
    return {
        path.name
        for path in FOLDER.glob("millstream-*")
        if str(path) not in inodes or f"socket:[{inodes[str(path)]}]" in ours
    }


def ways_taken() -> dict[str, int]:
    """How often a receiver here took a way, by "way outcome"."""
    return {
        f"{sample.labels['way']} {sample.labels['outcome']}": int(sample.value)
        for metric in EMBEDDING_TRANSFERS.collect()
        for sample in metric.samples
        if sample.labels["side"] == "receiver"
    }


def new_since(before: dict[str, int], now: dict[str, int] | None = None) -> dict[str, int]:
    return {
        key: count - before.get(key, 0)
        for key, count in (now or ways_taken()).items()
        if count != before.get(key, 0)
    }


class FetchOnly(encode_pb2_grpc.EncodeServiceServicer):
    """A base for servicers that encode nothing."""

    async def Encode(self, requests: Any, call: Any) -> AsyncIterator[Any]:
        raise NotImplementedError
        yield


class EncodeServicer(FetchOnly):
    """Hands out what is in a store."""

    def __init__(self, embeddings: EmbeddingServer) -> None:
        self._embeddings = embeddings

    async def Fetch(self, requests: Any, call: Any) -> AsyncIterator[Any]:
        async with contextlib.aclosing(self._embeddings.fetch(requests, call)) as responses:
            async for response in responses:
                yield response


@dataclass
class Sending:
    """The worker."""

    store: EmbeddingStore
    leases: Leases
    server: Server
    address: str

    def ticket(
        self, nbytes: int, tickets: EmbeddingTickets = TICKETS, address: str = ""
    ) -> EmbeddingTicket:
        """Put the tensor of this size there, and let it be fetched."""
        data, spec = pattern(nbytes), spec_of(nbytes)
        digest = hashlib.sha256(data).digest()
        stored = self.store.put(digest, Tensor(spec, memoryview(data)), None)
        item = EncodedItem(
            modality=Modality.IMAGE,
            digest=digest,
            tokens=spec.shape[0],
            geometry=Geometry(),
            tensor=spec,
            content=Content.ROWS,
            lease=self.leases.grant(stored, OWNER).name,
        )
        return tickets.mint(address or self.address, item)


@dataclass
class Held:
    """A receiver that has an offer and does nothing with it."""

    channel: Any
    call: Any
    way: str


def start_message(ticket: EmbeddingTicket, transfer: Transfer = Transfer.INLINE) -> Any:
    """Ask for a tensor, as a receiver that can shared memory or nothing."""
    shared = transfer is not Transfer.INLINE
    return encode_pb2.FetchRequest(
        start=encode_pb2.FetchStart(
            ticket=ticket_to_proto(ticket),
            shared_memory_domain=shared_memory.domain() if shared else "",
        )
    )


def open_fetch(channel: Any) -> Any:
    """Open the stream, and say nothing yet."""
    stub: Any = encode_pb2_grpc.EncodeServiceStub(channel)
    return stub.Fetch()


async def hold(ticket: EmbeddingTicket, transfer: Transfer) -> Held:
    """Fetch until the offer is there, and no further."""
    channel = grpc.aio.insecure_channel(ticket.address)
    call = open_fetch(channel)
    await call.write(start_message(ticket, transfer))
    offer = (await call.read()).offer
    return Held(channel, call, offer.WhichOneof("way"))


@contextlib.asynccontextmanager
async def sending(
    *,
    transfer: Transfer = Transfer.AUTO,
    capacity_bytes: int = 256 << 20,
    lease_s: float = 60.0,
    idle_s: float = 15.0,
    tracing: Tracing | None = None,
    tls: ServerTls | None = None,
) -> AsyncIterator[Sending]:
    """Serve on a free port of 127.0.0.1."""
    store = EmbeddingStore(capacity_bytes)
    leases = Leases(store, lease_s)
    embeddings = EmbeddingServer(leases, TICKETS, Sender(store, transfer), idle_s=idle_s)
    server = Server((SERVICE,), ServerOptions(max_receive_bytes=4 << 20, tracing=tracing, tls=tls))
    encode_pb2_grpc.add_EncodeServiceServicer_to_server(EncodeServicer(embeddings), server.methods)
    port = await server.listen("127.0.0.1:0")
    try:
        yield Sending(store, leases, server, f"127.0.0.1:{port}")
    finally:
        await server.stop(0)
        leases.close()
        store.close()
