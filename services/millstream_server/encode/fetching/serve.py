"""The end of EncodeService.Fetch that has the embedding."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import asdict
from typing import Any

from opentelemetry.trace import get_current_span

from millstream.v1 import encode_pb2, tensor_pb2
from millstream_server.encode.transfer import nixl
from millstream_server.encode.transfer.nixl import NixlSender
from millstream_server.encode.transfer.settings import Transfer
from millstream_server.encode.transfer.shared_memory import SharedMemorySender
from millstream_server.encode.transfer.store import EmbeddingStore, Leases, Stored
from millstream_server.encode.transfer.ticket import EmbeddingTickets
from millstream_server.encode.transfer.ways import (
    CHUNK_BYTES,
    WAY_OF,
    Abilities,
    InlineOffer,
    Opening,
)
from millstream_server.protobuf.media import ticket_from_proto
from millstream_server.runtime.errors import EmbeddingTransferError, InvalidRequestError
from millstream_server.runtime.rpc.call import Call
from millstream_server.runtime.telemetry.log import get_log
from millstream_server.runtime.telemetry.metrics import (
    EMBEDDING_BYTES,
    EMBEDDING_TRANSFERS,
    TICKETS_REFUSED,
)

log = get_log(__name__)

_IDLE_S = 15.0
_CAUSE_LENGTH = 64

Requests = AsyncIterator[encode_pb2.FetchRequest]
Responses = AsyncGenerator[encode_pb2.FetchResponse, None]


class Sender:
    """Offers tensors of a store in the best way that both ends can."""

    def __init__(self, store: EmbeddingStore, transfer: Transfer = Transfer.AUTO) -> None:
        """Offer what ``transfer`` allows; inline always is."""
        self._ways: list[SharedMemorySender | NixlSender] = []
        if transfer in (Transfer.AUTO, Transfer.SHARED_MEMORY):
            self._ways.append(SharedMemorySender(store.arena))
        if transfer in (Transfer.AUTO, Transfer.NIXL) and nixl.available():
            self._ways.append(NixlSender(store.arena))

    async def open(self, stored: Stored, abilities: Abilities) -> Opening:
        for way in self._ways:
            opening = await way.open(stored, abilities)
            if opening is not None:
                return opening
        return Opening(InlineOffer())


class EmbeddingServer:
    """Serves EncodeService.Fetch. A fetch pins its tensor until it ends, however it ends."""

    def __init__(
        self, leases: Leases, tickets: EmbeddingTickets, sender: Sender, *, idle_s: float = _IDLE_S
    ) -> None:
        """Cut a receiver off that takes nothing and says nothing for ``idle_s``."""
        self._leases = leases
        self._tickets = tickets
        self._sender = sender
        self._idle_s = idle_s

    async def fetch(self, requests: Requests, call: Call) -> Responses:
        """Hand one embedding out.

        Raises:
            InvalidRequestError: the ticket is forged or expired, or the caller broke the rules.
            EmbeddingTransferError: the lease has ended.
        """
        idle = _IdleLimit(call, self._idle_s)
        try:
            start = await _next(requests, "start")
            stored = self._find(start)
            with self._leases.store.pinned(stored):
                opening = await self._sender.open(stored, _abilities(start.start))
                fetch = _ServedFetch(stored, opening)
                try:
                    async with contextlib.aclosing(fetch.run(requests)) as responses:
                        async for response in responses:
                            yield response
                            idle.restart()
                finally:
                    fetch.end()
        finally:
            idle.stop()

    def _find(self, request: encode_pb2.FetchRequest) -> Stored:
        ticket = ticket_from_proto(request.start.ticket, "start.ticket")
        try:
            self._tickets.check(ticket)
        except InvalidRequestError:
            TICKETS_REFUSED.inc()
            raise
        lease = self._leases.find(ticket.lease)
        if lease is None:
            raise EmbeddingTransferError(
                "the embedding is no longer held for this request: its lease has ended; retry"
            )
        if lease.stored.spec != ticket.tensor:
            raise InvalidRequestError.of("start.ticket.tensor", "is not the lease's tensor")
        return lease.stored


class _ServedFetch:
    """One tensor on its way; `end` in any case."""

    def __init__(self, stored: Stored, opening: Opening) -> None:
        self._stored = stored
        self._opening = opening
        self._way = WAY_OF[type(opening.offer)]
        self._outcome = "broken"
        get_current_span().set_attributes(
            {"millstream.embedding.way": self._way, "millstream.embedding.bytes": stored.nbytes}
        )

    async def run(self, requests: Requests) -> Responses:
        """Offer the tensor, send it, wait for the outcome, confirm it."""
        stored = self._stored
        yield encode_pb2.FetchResponse(offer=_offer_to_proto(self._opening, stored.nbytes))
        if isinstance(self._opening.offer, InlineOffer):
            view = stored.view
            for begin in range(0, stored.nbytes, CHUNK_BYTES):
                data = bytes(view[begin : begin + CHUNK_BYTES])
                yield encode_pb2.FetchResponse(
                    chunk=tensor_pb2.TensorChunk(offset=begin, data=data)
                )
        told = await _next(requests, "done", "failed")
        self._opening.close()
        if told.HasField("done"):
            self._outcome = "done"
            EMBEDDING_BYTES.labels("sender", self._way).inc(stored.nbytes)
        else:
            self._outcome = "failed"
            cause = told.failed.cause[:_CAUSE_LENGTH]
            log.warning("the receiver couldn't read an embedding", way=self._way, cause=cause)
        yield encode_pb2.FetchResponse(released=encode_pb2.FetchReleased())

    def end(self) -> None:
        self._opening.close()
        get_current_span().set_attribute("millstream.embedding.outcome", self._outcome)
        EMBEDDING_TRANSFERS.labels("sender", self._way, self._outcome).inc()


class _IdleLimit:
    """Cancels a call that makes no progress."""

    def __init__(self, call: Call, limit_s: float) -> None:
        self._call = call
        self._limit_s = limit_s
        self._timer: asyncio.TimerHandle | None = None
        self.restart()

    def restart(self) -> None:
        self.stop()
        self._timer = asyncio.get_running_loop().call_later(self._limit_s, self._cut)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _cut(self) -> None:
        log.warning("a receiver of an embedding hangs; it is cut off", idle_s=self._limit_s)
        self._call.cancel()


async def _next(requests: Requests, *events: str) -> encode_pb2.FetchRequest:
    """Read the next message, which must have one of these events."""
    request = await anext(requests, None)
    if request is None or request.WhichOneof("event") not in events:
        raise InvalidRequestError.of("event", f"must be {' or '.join(events)} at this point")
    return request


# ---- conversion ----------------------------------------------------------------------------------


def _abilities(start: encode_pb2.FetchStart) -> Abilities:
    return Abilities(
        start.shared_memory_domain, tuple(start.open_segments), bytes(start.nixl_metadata)
    )


def _offer_to_proto(opening: Opening, nbytes: int) -> encode_pb2.FetchOffer:
    way: dict[str, Any] = {WAY_OF[type(opening.offer)]: asdict(opening.offer)}
    return encode_pb2.FetchOffer(total_bytes=nbytes, **way)
