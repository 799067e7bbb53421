"""What is refused, what breaks, and that nothing is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import signal
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from millstream.v1 import encode_pb2, encode_pb2_grpc, tensor_pb2
from millstream_server.encode.fetching.fetch import EmbeddingFetcher
from millstream_server.encode.transfer import shared_memory
from millstream_server.encode.transfer.settings import Transfer
from millstream_server.encode.transfer.ticket import EmbeddingTickets
from millstream_server.encode.transfer.ways import new_memory
from millstream_server.generation.ticket import TicketKey
from millstream_server.media.items import EmbeddingTicket
from millstream_server.runtime.errors import EmbeddingTransferError, InvalidRequestError
from millstream_testing.waiting import until
from tests.support.media.embedding_process import started, to_hex
from tests.support.media.embeddings import (
    TICKETS,
    FetchOnly,
    hold,
    names_in_shared_memory,
    open_fetch,
    pattern,
    sending,
    start_message,
)
from tests.support.wire.failures import Failure, refusal

MIB = 1 << 20
OLD = EmbeddingTickets(TicketKey(bytes(range(32))), now=lambda: 1e9)
FORGED = EmbeddingTickets(TicketKey(bytes(32)))


@contextlib.asynccontextmanager
async def fetching(
    transfer: Transfer = Transfer.AUTO, **options: Any
) -> AsyncIterator[EmbeddingFetcher]:
    fetcher = EmbeddingFetcher(TICKETS, transfer=transfer, **options)
    try:
        yield fetcher
    finally:
        await fetcher.close()


async def broken(fetcher: EmbeddingFetcher, ticket: EmbeddingTicket, within_s: float = 5) -> str:
    """Fetch what can't be fetched; return the sentence."""
    began_s = time.monotonic()
    with pytest.raises(EmbeddingTransferError) as caught:
        await fetcher.fetch(ticket)
    assert time.monotonic() - began_s < within_s
    assert caught.value.retryable
    assert ticket.address not in caught.value.message
    return caught.value.message


async def raw(ticket: EmbeddingTicket) -> Failure:
    """Fetch past the receiver's own checks; return how the sender refused."""
    async with grpc.aio.insecure_channel(ticket.address) as channel:
        call = open_fetch(channel)
        await call.write(start_message(ticket))
        return await refusal(call)


# ---- tickets and leases


@pytest.mark.parametrize(
    ("tickets", "field"), [(FORGED, "ticket.signature"), (OLD, "ticket.expires_at")]
)
async def test_a_bad_ticket_is_refused_by_both_ends(tickets: EmbeddingTickets, field: str) -> None:
    async with sending() as sender, fetching() as fetcher:
        ticket = sender.ticket(64, tickets)
        refused = await raw(ticket)
        assert refused.code is grpc.StatusCode.INVALID_ARGUMENT
        assert refused.reason == "INVALID_REQUEST"
        assert refused.fields == (field,)
        with pytest.raises(InvalidRequestError) as caught:
            await fetcher.fetch(ticket)
        assert [violation.field for violation in caught.value.violations] == [field]


async def test_an_address_that_the_processor_did_not_sign() -> None:
    async with sending() as sender, fetching() as fetcher:
        ticket = dataclasses.replace(sender.ticket(64), address="127.0.0.1:1")
        with pytest.raises(InvalidRequestError) as caught:
            await fetcher.fetch(ticket)
        assert [violation.field for violation in caught.value.violations] == ["ticket.signature"]


async def test_a_sender_with_another_key_refuses() -> None:
    async with sending() as sender, fetching() as fetcher:
        fetcher._tickets = FORGED
        with pytest.raises(InvalidRequestError) as caught:
            await fetcher.fetch(sender.ticket(64, FORGED))
        assert [violation.field for violation in caught.value.violations] == ["ticket"]


async def test_an_ended_lease() -> None:
    async with sending(lease_s=0.05) as sender, fetching() as fetcher:
        ticket = sender.ticket(64)
        await until(lambda: not len(sender.leases))
        refused = await raw(ticket)
        assert refused.code is grpc.StatusCode.UNAVAILABLE
        assert refused.reason == "EMBEDDING_TRANSFER_FAILED"
        assert refused.retryable
        await broken(fetcher, ticket)


async def test_a_lease_that_ends_during_a_fetch_does_not_stop_it() -> None:
    async with sending() as sender, grpc.aio.insecure_channel(sender.address) as channel:
        call = open_fetch(channel)
        await call.write(start_message(sender.ticket(3 * MIB)))
        assert (await call.read()).offer.total_bytes == 3 * MIB
        sender.leases.close()
        assert sender.store.pinned_bytes == 3 * MIB
        data = (await call.read()).chunk.data + (await call.read()).chunk.data
        assert data == pattern(3 * MIB)
        await call.write(encode_pb2.FetchRequest(done=encode_pb2.FetchDone()))
        assert (await call.read()).HasField("released")
        await until(lambda: sender.store.pinned_bytes == 0)
        assert await call.code() is grpc.StatusCode.OK


@pytest.mark.parametrize("event", ["done", "failed", None])
async def test_the_first_message_is_start(event: str | None) -> None:
    async with sending() as sender, grpc.aio.insecure_channel(sender.address) as channel:
        call = open_fetch(channel)
        message = encode_pb2.FetchRequest()
        if event:
            getattr(message, event).SetInParent()
        await call.write(message)
        refused = await refusal(call)
        assert refused.code is grpc.StatusCode.INVALID_ARGUMENT
        assert refused.fields == ("event",)


# ---- receivers that go away


@pytest.mark.parametrize("transfer", [Transfer.INLINE, Transfer.SHARED_MEMORY])
async def test_a_killed_receiver_frees_the_pin_and_the_name(transfer: Transfer) -> None:
    async with sending() as sender, started("receiver", transfer) as receiver:
        ticket = sender.ticket(33 * MIB)
        held = await receiver.ask(hold=to_hex(ticket))
        assert held["way"] == transfer.value
        assert bool(names_in_shared_memory()) is (transfer is Transfer.SHARED_MEMORY)
        sender.leases.close()
        assert sender.store.pinned_bytes == 33 * MIB
        await receiver.kill()
        await until(lambda: sender.store.pinned_bytes == 0)
        assert names_in_shared_memory() == set()


async def test_a_receiver_that_hangs_is_cut_off() -> None:
    async with sending(idle_s=0.2) as sender:
        held = await hold(sender.ticket(33 * MIB), Transfer.SHARED_MEMORY)
        sender.leases.close()
        await until(lambda: sender.store.pinned_bytes == 0)
        assert await held.call.code() is grpc.StatusCode.CANCELLED
        assert names_in_shared_memory() == set()
        await held.channel.close()


async def test_a_cancelled_fetch_frees_the_pin(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = _record_memory(monkeypatch)
    async with sending() as sender, fetching(Transfer.INLINE) as fetcher:
        ticket = sender.ticket(64 * MIB)
        fetch = asyncio.create_task(fetcher.fetch(ticket))
        await until(lambda: bool(begun))
        fetch.cancel()
        with pytest.raises(asyncio.CancelledError):
            await fetch
        sender.leases.close()
        await until(lambda: sender.store.pinned_bytes == 0)


# ---- senders that go away


async def test_a_sender_killed_before_it_offers() -> None:
    async with started("sender") as sender, fetching() as fetcher:
        first, second = await sender.ticket(64), await sender.ticket(128)
        assert (await fetcher.fetch(first)).data == pattern(64)
        sender.process.send_signal(signal.SIGSTOP)
        fetch = asyncio.create_task(broken(fetcher, second))
        await asyncio.sleep(0)
        await sender.kill()
        await fetch
        assert not _mapped(), "its memory is given back"
        await broken(fetcher, second)
    assert names_in_shared_memory() == set()


async def test_a_sender_killed_while_it_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = _record_memory(monkeypatch)
    async with started("sender") as sender, fetching(Transfer.INLINE) as fetcher:
        ticket = await sender.ticket(64 * MIB)
        fetch = asyncio.create_task(broken(fetcher, ticket))
        await until(lambda: bool(begun))
        await sender.kill()
        await fetch


async def test_a_sender_killed_before_it_hands_its_memory_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The only moment with a name: the receiver removes it."""
    hand_over = shared_memory._fetch_descriptor
    async with started("sender") as sender, fetching(Transfer.SHARED_MEMORY) as fetcher:

        async def killed_first(path: Path) -> int:
            assert names_in_shared_memory([sender.process.pid]) == {path.name}
            await sender.kill()
            return await hand_over(path)

        monkeypatch.setattr(shared_memory, "_fetch_descriptor", killed_first)
        await broken(fetcher, await sender.ticket(3 * MIB))
    assert names_in_shared_memory() == set()


async def test_a_sender_that_is_not_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    async with sending() as sender, fetching() as fetcher:
        await broken(fetcher, sender.ticket(64, address=f"127.0.0.1:{port}"))


async def test_a_sender_that_hangs() -> None:
    async with (
        lying(Silent()) as address,
        sending() as sender,
        fetching(timeout_s=0.3) as fetcher,
    ):
        message = await broken(fetcher, sender.ticket(64, address=address))
        assert message.endswith("within 0.3 s; retry")


# ---- senders that break the protocol


class Silent(FetchOnly):
    """Takes a fetch and says nothing."""

    async def Fetch(self, requests: Any, _: Any) -> AsyncIterator[Any]:
        async for _request in requests:
            pass
        yield None


class Liar(FetchOnly):
    """Responds with what it is told."""

    def __init__(self, *responses: Any) -> None:
        self.responses = responses

    async def Fetch(self, requests: Any, _: Any) -> AsyncIterator[Any]:
        start = (await anext(requests)).start
        way = self.responses[0].offer.WhichOneof("way")
        if way != "inline" and not start.shared_memory_domain:
            return  # it has nothing inline
        for response in self.responses:
            yield response
        async for _request in requests:
            yield encode_pb2.FetchResponse(released=encode_pb2.FetchReleased())
            return


def offer(total: int = 64, *, way: dict[str, Any]) -> Any:
    return encode_pb2.FetchResponse(offer=encode_pb2.FetchOffer(total_bytes=total, **way))


def chunk(at: int, nbytes: int) -> Any:
    return encode_pb2.FetchResponse(chunk=tensor_pb2.TensorChunk(offset=at, data=bytes(nbytes)))


INLINE: dict[str, Any] = {"inline": encode_pb2.InlineBytes()}
RELEASED = encode_pb2.FetchResponse(released=encode_pb2.FetchReleased())


@pytest.mark.parametrize(
    "responses",
    [
        (offer(65, way=INLINE), chunk(0, 65)),
        (offer(way=INLINE), chunk(0, 65)),
        (offer(way=INLINE), chunk(1, 63)),
        (offer(way=INLINE), chunk(0, 32), chunk(16, 32)),
        (offer(way=INLINE), chunk(0, 32), chunk(32, 0)),
        (offer(way=INLINE), chunk(0, 32), RELEASED),
        (offer(way=INLINE), chunk(0, 64), chunk(64, 1)),
        (offer(way=INLINE), offer(way=INLINE)),
    ],
    ids=("more", "too-long", "gap", "overlap", "empty", "short", "after", "twice"),
)
async def test_a_lie_about_the_bytes(responses: tuple[Any, ...]) -> None:
    async with (
        lying(Liar(*responses)) as address,
        sending() as sender,
        fetching(Transfer.INLINE) as fetcher,
    ):
        await broken(fetcher, sender.ticket(64, address=address))


@pytest.mark.parametrize(
    ("name", "segment_size_bytes"),
    [
        ("../../etc/passwd", 4096),
        ("millstream-" + "0" * 32, 4096),
        ("millstream-" + "0" * 32 + "/..", 4096),
        ("", 4096),
    ],
)
async def test_a_name_that_is_none(
    name: str, segment_size_bytes: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The receiver asks for the bytes inline instead; this liar has none."""
    shared = encode_pb2.SharedMemoryBytes(
        segment="a", name=name, segment_size_bytes=segment_size_bytes, offset=0
    )
    liar = Liar(offer(way={"shared_memory": shared}))
    async with lying(liar) as address, sending() as sender, fetching() as fetcher:
        await broken(fetcher, sender.ticket(64, address=address))
    assert "a way of transfer failed; going inline" in caplog.messages


@contextlib.asynccontextmanager
async def lying(liar: FetchOnly) -> AsyncIterator[str]:
    server = grpc.aio.server()
    encode_pb2_grpc.add_EncodeServiceServicer_to_server(liar, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


def _mapped() -> bool:
    return "memfd:millstream" in Path("/proc/self/maps").read_text()


def _record_memory(monkeypatch: pytest.MonkeyPatch) -> list[memoryview]:
    """Return a list that isn't empty as soon as the first bytes of a fetch have come."""
    begun: list[memoryview] = []

    def recorded(nbytes: int) -> memoryview:
        begun.append(new_memory(nbytes))
        return begun[-1]

    monkeypatch.setattr("millstream_server.encode.fetching.peer.new_memory", recorded)
    return begun
