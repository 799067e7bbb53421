"""Every way moves the right bytes, between real processes and in the test's own."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import importlib.util
from collections.abc import AsyncIterator

import pytest

from millstream_server.encode.fetching.fetch import EmbeddingFetcher
from millstream_server.encode.transfer import shared_memory
from millstream_server.encode.transfer.settings import Transfer
from millstream_testing.waiting import until
from tests.support.media.embedding_process import started
from tests.support.media.embeddings import (
    TICKETS,
    Sending,
    names_in_shared_memory,
    new_since,
    pattern,
    sending,
    ways_taken,
)
from tests.support.telemetry.spans import SpanLog

MIB = 1 << 20
SIZES = (64, MIB // 2, 2 * MIB + 2, 33 * MIB)
"""One below a chunk, one just above, many; 2 MiB + 2 since elements have at least 2 bytes."""
NIXL = pytest.mark.skipif(
    importlib.util.find_spec("nixl") is None, reason="the package nixl is not installed"
)


@contextlib.asynccontextmanager
async def fetching(
    transfer: Transfer = Transfer.AUTO, **options: object
) -> AsyncIterator[EmbeddingFetcher]:
    fetcher = EmbeddingFetcher(TICKETS, transfer=transfer, **options)  # type: ignore[arg-type]
    try:
        yield fetcher
    finally:
        await fetcher.close()


async def check(sender: Sending, fetcher: EmbeddingFetcher, nbytes: int) -> None:
    ticket = sender.ticket(nbytes)
    tensor = await fetcher.fetch(ticket)
    assert tensor.spec == ticket.tensor
    assert tensor.data.nbytes == nbytes
    assert tensor.data == pattern(nbytes)


@pytest.mark.parametrize(
    ("transfer", "way"),
    [
        ("inline", "inline"),
        ("shared_memory", "shared_memory"),
        ("auto", "shared_memory"),
    ],
)
async def test_between_two_processes(transfer: str, way: str) -> None:
    async with (
        started("sender", Transfer(transfer)) as sender,
        started("receiver", Transfer(transfer)) as receiver,
    ):
        for count, nbytes in enumerate(SIZES, start=1):
            got = await receiver.fetch(await sender.ticket(nbytes))
            assert got["sha256"] == hashlib.sha256(pattern(nbytes)).hexdigest()
            assert got["ways"] == {f"{way} done": count}


@NIXL
async def test_nixl_between_two_processes() -> None:
    """Inline until both ends have started their agents."""
    async with (
        started("sender", Transfer.NIXL) as sender,
        started("receiver", Transfer.NIXL) as receiver,
    ):
        for nbytes in SIZES:
            ticket = await sender.ticket(nbytes)
            expected = hashlib.sha256(pattern(nbytes)).hexdigest()

            async def by_nixl() -> bool:
                before = await receiver.ask(ways=True)
                got = await receiver.fetch(ticket)  # noqa: B023 - awaited in this round
                assert got["sha256"] == expected  # noqa: B023
                new = new_since(before["ways"], got["ways"])
                assert new in ({"inline done": 1}, {"nixl done": 1})
                return "nixl done" in new

            await until(by_nixl, 60)
        await sender.kill()
        assert await receiver.fetch(ticket) == {"error": "EMBEDDING_TRANSFER_FAILED"}


@pytest.mark.parametrize("transfer", [Transfer.INLINE, Transfer.SHARED_MEMORY])
@pytest.mark.parametrize("nbytes", SIZES)
async def test_in_one_process(transfer: Transfer, nbytes: int) -> None:
    before = ways_taken()
    async with sending() as sender, fetching(transfer) as fetcher:
        await check(sender, fetcher, nbytes)
        assert new_since(before) == {f"{transfer.value} done": 1}
        sender.leases.close()
        assert sender.store.pinned_bytes == 0
        assert names_in_shared_memory() == set()


async def test_the_lesser_end_decides() -> None:
    before = ways_taken()
    async with sending(transfer=Transfer.INLINE) as sender, fetching(Transfer.SHARED_MEMORY) as f:
        await check(sender, f, 3 * MIB)
    assert new_since(before) == {"inline done": 1}


async def test_a_segment_is_mapped_once() -> None:
    async with sending() as sender, fetching(Transfer.SHARED_MEMORY) as fetcher:
        for nbytes in (64, 128, 192):
            await check(sender, fetcher, nbytes)
        with open("/proc/self/maps", encoding="utf-8") as maps:  # noqa: ASYNC230, PTH123
            mapped = [line for line in maps if "memfd:millstream" in line]
        assert len(mapped) == 2, "the sender's own, and the receiver's"
        assert sum(" r--s " in line or "r--s" in line for line in mapped) == 1


async def test_two_receivers_at_once_map_the_same_segment() -> None:
    before = ways_taken()
    async with (
        sending() as sender,
        fetching(Transfer.SHARED_MEMORY) as one,
        fetching(Transfer.SHARED_MEMORY) as other,
    ):
        ticket = sender.ticket(5 * MIB)
        first, second = await asyncio.gather(one.fetch(ticket), other.fetch(ticket))
        assert first.data == second.data == pattern(5 * MIB)
        assert names_in_shared_memory() == set()
    assert new_since(before) == {"shared_memory done": 2}


async def test_two_fetches_of_one_ticket_share_a_transfer() -> None:
    before = ways_taken()
    async with sending() as sender, fetching(Transfer.INLINE) as fetcher:
        ticket = sender.ticket(5 * MIB)
        first, second = await asyncio.gather(fetcher.fetch(ticket), fetcher.fetch(ticket))
        assert first is second
        again = await fetcher.fetch(ticket)
        assert again is not first
        assert again.data == pattern(5 * MIB)
    assert new_since(before) == {"inline done": 2}


async def test_one_of_two_that_share_a_transfer_gives_up() -> None:
    async with sending() as sender, fetching(Transfer.INLINE) as fetcher:
        ticket = sender.ticket(5 * MIB)
        patient, leaver = (asyncio.create_task(fetcher.fetch(ticket)) for _ in range(2))
        await asyncio.sleep(0)
        leaver.cancel()
        assert (await patient).data == pattern(5 * MIB)
        assert leaver.cancelled()


async def test_what_this_process_holds_is_read_directly() -> None:
    before = ways_taken()
    async with sending() as sender, fetching(local=sender.leases) as fetcher:
        await check(sender, fetcher, 5 * MIB)
    assert new_since(before) == {"local done": 1}


async def test_a_sender_without_memfds_goes_inline(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError("no memfds here")

    monkeypatch.setattr("os.memfd_create", refuse)
    before = ways_taken()
    async with sending() as sender, fetching(Transfer.SHARED_MEMORY) as fetcher:
        await check(sender, fetcher, 3 * MIB)
    assert new_since(before) == {"inline done": 1}


async def test_a_machine_without_dev_shm_goes_inline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "domain", lambda: "")
    before = ways_taken()
    async with sending() as sender, fetching(Transfer.SHARED_MEMORY) as fetcher:
        await check(sender, fetcher, 3 * MIB)
    assert new_since(before) == {"inline done": 1}


async def test_a_segment_that_cannot_be_opened_is_replaced_by_inline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shared_memory, "is_sealed", lambda _: False)
    before = ways_taken()
    async with sending() as sender, fetching(Transfer.SHARED_MEMORY) as fetcher:
        await check(sender, fetcher, 3 * MIB)
        sender.leases.close()
        assert sender.store.pinned_bytes == 0
    assert new_since(before) == {"shared_memory failed": 1, "inline done": 1}


async def test_the_tensor_is_the_callers_own() -> None:
    async with (
        sending(capacity_bytes=4 * MIB) as sender,
        fetching(Transfer.SHARED_MEMORY) as fetcher,
    ):
        tensor = await fetcher.fetch(sender.ticket(3 * MIB))
        sender.leases.close()
        sender.ticket(4 * MIB)  # takes its place in the store
        assert tensor.data == pattern(3 * MIB)
        assert not tensor.data.readonly, "torch.frombuffer warns of memory that is"


async def test_the_trace_shows_the_way() -> None:
    spans = SpanLog()
    async with (
        sending(tracing=spans.tracing) as sender,
        fetching(Transfer.SHARED_MEMORY, tracing=spans.tracing) as fetcher,
    ):
        await check(sender, fetcher, 3 * MIB)
        await spans.until_ended(2)
    fetched = spans.named("fetch embedding")
    served = spans.named("millstream.v1.EncodeService/Fetch")
    assert served.parent is not None
    assert fetched.context is not None
    assert served.parent.span_id == fetched.context.span_id
    for span in (served, fetched):
        assert span.attributes is not None
        assert span.attributes["millstream.embedding.way"] == "shared_memory"
        assert span.attributes["millstream.embedding.bytes"] == 3 * MIB
    assert served.attributes is not None
    assert served.attributes["millstream.embedding.outcome"] == "done"
