"""What happens around NIXL, with an agent of the test's own; tests of ways run the real one."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
from collections.abc import AsyncIterator
from typing import Any, ClassVar

import pytest

from millstream_server.encode.fetching.fetch import EmbeddingFetcher
from millstream_server.encode.transfer import nixl
from millstream_server.encode.transfer.nixl import NixlReceiver
from millstream_server.encode.transfer.settings import Transfer
from millstream_server.encode.transfer.ways import NixlOffer, WayError
from millstream_testing.waiting import until
from tests.support.media.embeddings import TICKETS, Sending, new_since, pattern, sending, ways_taken

MIB = 1 << 20


class Agent:
    """Reads with memmove; ``fault`` is raised instead, and ``gate`` is waited for."""

    fault: ClassVar[Exception | None] = None
    gate: ClassVar[asyncio.Event | None] = None
    starts: ClassVar[int] = 0
    registered: ClassVar[list[int]] = []
    deregistered: ClassVar[list[int]] = []
    forgotten: ClassVar[list[bytes]] = []

    def __init__(self, address: int = 0, nbytes: int = 0) -> None:
        Agent.starts += 1
        self.metadata = b"sender" if nbytes else b"receiver"

    def register(self, address: int, nbytes: int) -> int:
        Agent.registered.append(nbytes)
        return nbytes

    def deregister(self, registered: int) -> None:
        Agent.deregistered.append(registered)

    async def read(self, offer: NixlOffer, into: int, nbytes: int) -> None:
        assert offer.metadata == b"sender"
        if Agent.gate is not None:
            await Agent.gate.wait()
        if Agent.fault is not None:
            raise Agent.fault
        ctypes.memmove(into, offer.address, nbytes)

    def forget(self, metadata: bytes) -> None:
        Agent.forgotten.append(metadata)


@pytest.fixture(autouse=True)
def agent(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("fault", None), ("gate", None), ("starts", 0)):
        monkeypatch.setattr(Agent, name, value)
    for name in ("registered", "deregistered", "forgotten"):
        monkeypatch.setattr(Agent, name, [])
    monkeypatch.setattr(nixl, "_Agent", Agent)
    monkeypatch.setattr(nixl, "available", lambda: True)


@contextlib.asynccontextmanager
async def both(transfer: Transfer = Transfer.NIXL) -> AsyncIterator[tuple[Sending, Any]]:
    """Serve and fetch, with both agents started."""
    async with sending(transfer=transfer) as sender:
        fetcher = EmbeddingFetcher(TICKETS, transfer=transfer)
        ticket = sender.ticket(64)

        async def by_nixl() -> bool:
            before = ways_taken()
            assert (await fetcher.fetch(ticket)).data == pattern(64)
            return new_since(before) == {"nixl done": 1}

        await until(by_nixl)
        assert Agent.starts == 2
        yield sender, fetcher
        await fetcher.close()


async def test_memory_to_read_into_is_used_again() -> None:
    async with both() as (sender, fetcher):
        for nbytes in (MIB, 3 * MIB, 9 * MIB, 16 * MIB, MIB):
            before = ways_taken()
            assert (await fetcher.fetch(sender.ticket(nbytes))).data == pattern(nbytes)
            assert new_since(before) == {"nixl done": 1}
        assert Agent.registered == [4 * MIB, 16 * MIB]
        two = [sender.ticket(nbytes) for nbytes in (3 * MIB, 2 * MIB)]
        first, second = await asyncio.gather(*(fetcher.fetch(ticket) for ticket in two))
        assert (first.data, second.data) == (pattern(3 * MIB), pattern(2 * MIB))
    assert Agent.forgotten == [b"sender"]


@pytest.mark.parametrize("fault", [RuntimeError("NIXL_ERR_BACKEND"), WayError("nixl_state")])
async def test_a_read_that_fails_is_replaced_by_inline(fault: Exception) -> None:
    async with both() as (sender, fetcher):
        Agent.fault = fault
        before = ways_taken()
        assert (await fetcher.fetch(sender.ticket(3 * MIB))).data == pattern(3 * MIB)
        assert new_since(before) == {"nixl failed": 1, "inline done": 1}
        sender.leases.close()
        assert sender.store.pinned_bytes == 0


async def test_memory_of_a_read_that_never_ends_is_not_used_again() -> None:
    async with both() as (sender, fetcher):
        assert Agent.registered == [4 * MIB]
        Agent.fault = TimeoutError()
        await fetcher.fetch(sender.ticket(3 * MIB))
        Agent.fault = None
        await fetcher.fetch(sender.ticket(2 * MIB))
        assert Agent.registered == [4 * MIB, 4 * MIB]


async def test_a_cancelled_fetch_keeps_its_memory_until_the_read_ends() -> None:
    async with both() as (sender, fetcher):
        Agent.gate = asyncio.Event()
        fetch = asyncio.create_task(fetcher.fetch(sender.ticket(3 * MIB)))
        await until(lambda: sender.store.pinned_bytes > 3 * MIB)
        receiver: NixlReceiver = fetcher._peers._nixl
        await until(lambda: bool(receiver._reads))
        fetch.cancel()
        with pytest.raises(asyncio.CancelledError):
            await fetch
        assert receiver._idle == []
        Agent.gate.set()
        await until(lambda: len(receiver._idle) == 1)


async def test_an_agent_that_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[int] = []

    def fail(*_: int) -> None:
        tries.append(1)
        raise RuntimeError("no UCX")

    monkeypatch.setattr(nixl, "_Agent", fail)
    before = ways_taken()
    async with sending(transfer=Transfer.NIXL) as sender:
        fetcher = EmbeddingFetcher(TICKETS, transfer=Transfer.NIXL)
        await fetcher.fetch(sender.ticket(64))
        await until(lambda: bool(tries))
        await fetcher.fetch(sender.ticket(128))
        await fetcher.close()
    assert tries == [1], "it is tried once"
    assert new_since(before) == {"inline done": 2}


async def test_auto_starts_the_agent_after_the_first_inline_transfer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On one machine with shared memory it is never started."""
    async with sending() as sender:
        near = EmbeddingFetcher(TICKETS)
        await near.fetch(sender.ticket(64))
        await near.close()
        assert Agent.starts == 0
        monkeypatch.setattr("millstream_server.encode.transfer.shared_memory.domain", lambda: "")
        far = EmbeddingFetcher(TICKETS)
        await far.fetch(sender.ticket(128))
        await until(lambda: Agent.starts == 1)
        await far.close()
