"""Encode workers, as a worker that fetches from them sees them: channels, and the open ways."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, fields
from typing import Any

import grpc

from millstream.v1 import encode_pb2, encode_pb2_grpc
from millstream_server.encode.transfer import nixl, shared_memory
from millstream_server.encode.transfer.nixl import NixlReceiver
from millstream_server.encode.transfer.settings import Transfer
from millstream_server.encode.transfer.shared_memory import SharedMemoryReceiver
from millstream_server.encode.transfer.ways import (
    CHUNK_BYTES,
    WAY_OF,
    Abilities,
    InlineOffer,
    NixlOffer,
    Offer,
    SharedMemoryOffer,
    WayError,
    new_memory,
)
from millstream_server.media.items import EmbeddingTicket
from millstream_server.protobuf.media import ticket_to_proto
from millstream_server.runtime.rpc.channel import channel_options, open_channel
from millstream_server.runtime.security.tls import ClientTls
from millstream_server.runtime.telemetry.client_rpcs import observe_call
from millstream_server.runtime.telemetry.log import get_log
from millstream_server.runtime.telemetry.metrics import EMBEDDING_TRANSFERS

log = get_log(__name__)

_CHANNEL_OPTIONS = channel_options(max_receive_bytes=2 * CHUNK_BYTES)
_METHOD = "millstream.v1.EncodeService/Fetch"


class BrokenTransferError(Exception):
    """The sender didn't keep to the protocol, or ended the stream."""


class Receiver:
    """Reads what one sender offers. NIXL's agent is shared by all receivers of the process."""

    def __init__(self, transfer: Transfer, reader: NixlReceiver | None) -> None:
        """Take what ``transfer`` allows; ``reader`` None: no NIXL, or it isn't allowed."""
        self._shared = transfer in (Transfer.AUTO, Transfer.SHARED_MEMORY)
        self._nixl = reader
        self._segments = SharedMemoryReceiver()
        self._remote = b""
        """Metadata of the sender's NIXL agent."""

    def abilities(self) -> Abilities:
        if self._nixl is not None and not self._shared:
            self._nixl.begin()
        return Abilities(
            shared_memory.domain() if self._shared else "",
            self._segments.open_segments,
            self._nixl.metadata if self._nixl else b"",
        )

    async def read(self, offer: SharedMemoryOffer | NixlOffer, nbytes: int) -> memoryview:
        """Return the bytes in memory of their own."""
        if isinstance(offer, SharedMemoryOffer):
            return await self._segments.read(offer, nbytes)
        if self._nixl is None:
            raise WayError("nixl_agent", "offered without being asked for")
        self._remote = offer.metadata
        return await self._nixl.read(offer, nbytes)

    def went_inline(self) -> None:
        if self._nixl is not None:
            self._nixl.begin()

    def close(self) -> None:
        self._segments.close()
        if self._nixl is not None and self._remote:
            self._nixl.forget(self._remote)


class Peer:
    """A long-lived channel to an encode worker, and what this process has open of it."""

    def __init__(self, address: str, tls: ClientTls | None, receiver: Receiver) -> None:
        """Connect when it is first used."""
        self.fetching = 0
        self._receiver = receiver
        self._channel = open_channel(address, tls, options=_CHANNEL_OPTIONS)
        self._stub: Any = encode_pb2_grpc.EncodeServiceStub(self._channel)

    async def fetch(
        self, ticket: EmbeddingTicket, metadata: Mapping[str, str], on_way: Callable[[str], None]
    ) -> memoryview:
        """Return the bytes; ``on_way`` is called with the name of the way that they go.

        A way that doesn't work is replaced by the inline one, once.

        Raises:
            grpc.aio.AioRpcError, BrokenTransferError, WayError: it failed.
        """
        try:
            abilities = self._receiver.abilities()
            return await self._attempt(ticket, abilities, metadata, on_way)
        except WayError as error:
            log.warning("a way of transfer failed; going inline", cause=error.cause, error=error)
            return await self._attempt(ticket, Abilities(), metadata, on_way)

    def forget(self) -> None:
        """The sender is gone: give its memory back."""
        self._receiver.close()

    async def close(self) -> None:
        """Close the channel; fetches that run fail."""
        self._receiver.close()
        await self._channel.close(None)

    async def _attempt(
        self,
        ticket: EmbeddingTicket,
        abilities: Abilities,
        metadata: Mapping[str, str],
        on_way: Callable[[str], None],
    ) -> memoryview:
        call = self._stub.Fetch(metadata=tuple(metadata.items()))
        observe_call(call, _METHOD)
        way, outcome = "none", "broken"
        try:
            await _write(call, _start(ticket, abilities))
            offer = _offer_from_proto(await _next(call, "offer"), ticket)
            way = WAY_OF[type(offer)]
            on_way(way)
            try:
                data = await self._read(call, offer, ticket.tensor.nbytes)
            except WayError as error:
                outcome = "failed"
                failed = encode_pb2.FetchFailed(cause=error.cause)
                await _finish(call, encode_pb2.FetchRequest(failed=failed))
                raise
            await _finish(call, encode_pb2.FetchRequest(done=encode_pb2.FetchDone()))
            outcome = "done"
            return data
        finally:
            call.cancel()  # no effect when it has ended
            EMBEDDING_TRANSFERS.labels("receiver", way, outcome).inc()

    async def _read(self, call: Any, offer: Offer, nbytes: int) -> memoryview:
        if not isinstance(offer, InlineOffer):
            return await self._receiver.read(offer, nbytes)
        data, at = new_memory(nbytes), 0
        while at < nbytes:
            chunk = (await _next(call, "chunk")).chunk
            end = at + len(chunk.data)
            if chunk.offset != at or not at < end <= nbytes:
                raise BrokenTransferError(f"bytes {chunk.offset} to {end} came after {at}")
            data[at:end] = chunk.data
            at = end
        self._receiver.went_inline()
        return data


def _start(ticket: EmbeddingTicket, abilities: Abilities) -> encode_pb2.FetchRequest:
    return encode_pb2.FetchRequest(
        start=encode_pb2.FetchStart(ticket=ticket_to_proto(ticket), **asdict(abilities))
    )


async def _next(call: Any, event: str) -> encode_pb2.FetchResponse:
    response = await call.read()
    if response is grpc.aio.EOF:  # type: ignore[attr-defined]
        raise BrokenTransferError(f"the stream ended before {event}")
    if response.WhichOneof("event") != event:
        raise BrokenTransferError(f"{response.WhichOneof('event')} came instead of {event}")
    return response  # type: ignore[no-any-return]


async def _write(call: Any, message: encode_pb2.FetchRequest) -> None:
    with contextlib.suppress(asyncio.InvalidStateError):  # it has ended; reading tells why
        await call.write(message)


async def _finish(call: Any, outcome: encode_pb2.FetchRequest) -> None:
    """Tell the outcome, and wait until it is confirmed: so long the bytes were safe."""
    await _write(call, outcome)
    await _next(call, "released")
    if await call.read() is not grpc.aio.EOF:  # type: ignore[attr-defined]
        raise BrokenTransferError("more came after the end")


def _offer_from_proto(response: encode_pb2.FetchResponse, ticket: EmbeddingTicket) -> Offer:
    offer = response.offer
    if offer.total_bytes != ticket.tensor.nbytes:
        raise BrokenTransferError(f"{offer.total_bytes} bytes for {ticket.tensor.nbytes}")
    for kind, way in WAY_OF.items():
        if way == offer.WhichOneof("way"):
            message = getattr(offer, way)
            return kind(**{f.name: getattr(message, f.name) for f in fields(kind)})
    raise BrokenTransferError("an offer of a way that this worker doesn't know")


UNUSED_S = 60.0
"""A sender that nothing is fetched from for so long is disconnected, and its memory unmapped."""


class Peers:
    """One `Peer` per address, while it is used and some time after."""

    def __init__(self, transfer: Transfer, tls: ClientTls | None) -> None:
        self._transfer = transfer
        self._tls = tls
        wants_nixl = transfer in (Transfer.AUTO, Transfer.NIXL) and nixl.available()
        self._nixl = NixlReceiver() if wants_nixl else None
        self._open: dict[str, Peer] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._open)

    @contextlib.contextmanager
    def using(self, address: str) -> Iterator[Peer]:
        """Connect, and stay connected inside the block. Changed certificates need a new channel."""
        self._stop_timer(address)
        peer = self._open.get(address)
        if peer is None or (self._tls and self._tls.changed()):
            if peer is not None and not peer.fetching:
                self._close(peer)
            peer = self._open[address] = Peer(
                address, self._tls, Receiver(self._transfer, self._nixl)
            )
        peer.fetching += 1
        try:
            yield peer
        finally:
            peer.fetching -= 1
            if not peer.fetching:
                self._unused(address, peer)

    async def close(self) -> None:
        """Close all channels; fetches that run fail."""
        for address in list(self._open):
            self._disconnect(address)
        if self._closing:
            await asyncio.wait(self._closing)

    def _unused(self, address: str, peer: Peer) -> None:
        if self._open.get(address) is not peer:  # replaced, or all are closed
            self._close(peer)
            return
        loop = asyncio.get_running_loop()
        self._timers[address] = loop.call_later(UNUSED_S, self._disconnect, address)

    def _disconnect(self, address: str) -> None:
        self._stop_timer(address)
        self._close(self._open.pop(address))

    def _stop_timer(self, address: str) -> None:
        timer = self._timers.pop(address, None)
        if timer is not None:
            timer.cancel()

    def _close(self, peer: Peer) -> None:
        closing = asyncio.create_task(peer.close())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)
