"""The allocator and the store: what is where, what is dropped, what is kept."""

from __future__ import annotations

import asyncio
import random

import pytest

from millstream_server.encode.transfer.arena import Allocator, aligned
from millstream_server.encode.transfer.store import EmbeddingStore, Stored
from millstream_server.media.tensor import ElementType, Tensor, TensorSpec
from millstream_server.runtime.errors import InvalidRequestError, OverloadedError

KIB = 1 << 10


def tensor(nbytes: int, fill: int = 1) -> Tensor:
    spec = TensorSpec(ElementType.FLOAT16, (nbytes // 2,))
    return Tensor(spec, memoryview(bytes([fill]) * nbytes))


def put(store: EmbeddingStore, name: str, nbytes: int = KIB) -> Stored:
    return store.put(name.encode(), tensor(nbytes, ord(name)), name)


def kept(store: EmbeddingStore) -> str:
    return "".join(name for name in "abcdefgh" if store._entries.get(name.encode()))


# ---- the allocator


def test_pieces_are_aligned_and_take_the_first_room() -> None:
    allocator = Allocator(1024)
    assert [allocator.take(n) for n in (1, 256, 257)] == [0, 256, 512]
    assert allocator.take(1) is None
    allocator.give_back(256, 256)
    assert allocator.take(257) is None
    assert allocator.take(200) == 256


def test_freed_neighbours_become_one_range() -> None:
    for order in ((0, 256, 512), (512, 256, 0), (0, 512, 256), (256, 0, 512)):
        allocator = Allocator(768)
        assert [allocator.take(256) for _ in range(3)] == [0, 256, 512]
        for offset in order:
            allocator.give_back(offset, 256)
        assert allocator.take(768) == 0


def test_random_pieces_never_overlap() -> None:
    draw = random.Random(1)
    allocator, taken = Allocator(64 * KIB), dict[int, int]()
    for _ in range(2000):
        nbytes = draw.randrange(1, 8 * KIB)
        offset = allocator.take(nbytes)
        if offset is None:
            gone = draw.choice(list(taken))
            allocator.give_back(gone, taken.pop(gone))
            continue
        taken[offset] = nbytes
        ends = [at + aligned(size) for at, size in sorted(taken.items())]
        assert all(end <= at for end, at in zip(ends, [*sorted(taken)[1:], 64 * KIB], strict=True))
    for offset, nbytes in taken.items():
        allocator.give_back(offset, nbytes)
    assert allocator.take(64 * KIB) == 0


# ---- the store


def test_what_is_put_can_be_read() -> None:
    store = EmbeddingStore(4 * KIB)
    stored = put(store, "a")
    assert stored.view == b"a" * KIB
    assert stored.view.readonly
    assert (stored.nbytes, stored.item, stored.spec) == (KIB, "a", tensor(KIB).spec)
    assert store.get(b"a") is stored
    assert store.get(b"b") is None
    assert put(store, "a") is stored
    assert (store.used_bytes, store.pinned_bytes, store.capacity_bytes) == (KIB, 0, 4 * KIB)


def test_a_tensor_of_several_dimensions() -> None:
    store = EmbeddingStore(KIB)
    data = memoryview(bytes(range(24))).cast("B", (2, 12))
    stored = store.put(b"a", Tensor(TensorSpec(ElementType.FLOAT32, (2, 3)), data), None)
    assert stored.view == bytes(range(24))


def test_the_oldest_is_dropped_and_reading_makes_young() -> None:
    store = EmbeddingStore(3 * KIB)
    for name in "abc":
        put(store, name)
    store.get(b"a")
    put(store, "d")
    assert kept(store) == "acd"
    put(store, "e", 2 * KIB)
    assert kept(store) == "de" or store.used_bytes <= 3 * KIB
    assert store.get(b"e")


def test_a_pinned_one_is_kept() -> None:
    store = EmbeddingStore(3 * KIB)
    first = put(store, "a")
    with store.pinned(first), store.pinned(first):
        assert store.pinned_bytes == KIB
        for name in "bcdef":
            put(store, name)
        assert kept(store) == "aef"
        assert first.view == b"a" * KIB
    assert store.pinned_bytes == 0
    for name in "bcd":
        put(store, name)
    assert kept(store) == "bcd"


def test_no_room_beside_pinned_ones_drops_nothing() -> None:
    store = EmbeddingStore(3 * KIB)
    store.pin(put(store, "a"))
    store.pin(put(store, "b"))
    put(store, "c")
    with pytest.raises(OverloadedError) as caught:
        put(store, "d", 2 * KIB)
    assert caught.value.message == (
        "2048 bytes for an embedding aren't free: 2048 of 3072 hold others that are not fetched "
        "yet; retry"
    )
    assert caught.value.retry_delay_s
    assert kept(store) == "abc"


def test_room_in_pieces_between_pinned_ones_is_no_room() -> None:
    store = EmbeddingStore(3 * KIB)
    put(store, "a")
    store.pin(put(store, "b"))
    put(store, "c")
    with pytest.raises(OverloadedError):
        put(store, "d", 2 * KIB)
    assert put(store, "e").view == b"e" * KIB


@pytest.mark.parametrize("capacity", [0, KIB])
def test_more_than_the_store(capacity: int) -> None:
    store = EmbeddingStore(capacity)
    with pytest.raises(InvalidRequestError) as caught:
        put(store, "a", capacity + 2)
    (violation,) = caught.value.violations
    assert violation.field == "data"
    assert f"{capacity + 2} bytes; this worker's store has {capacity}" in violation.description


def test_a_dropped_one_cannot_be_pinned() -> None:
    store = EmbeddingStore(KIB)
    first = put(store, "a")
    put(store, "b")
    with pytest.raises(ValueError, match="no longer in the store"):
        store.pin(first)
    with pytest.raises(ValueError, match="isn't pinned"):
        store.unpin(first)


def test_a_view_outlives_the_store() -> None:
    store = EmbeddingStore(KIB)
    view = put(store, "a").view
    store.close()
    assert view == b"a" * KIB


async def test_a_large_tensor_is_put_while_the_event_loop_runs() -> None:
    store = EmbeddingStore(8 << 20)
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    counting = asyncio.ensure_future(count())
    made = tensor(5 << 20, 7)
    stored = await store.put_in_steps(b"a", made, "a")
    counting.cancel()
    assert turns >= 2
    assert stored.view == made.data
    assert (store.used_bytes, store.pinned_bytes) == (5 << 20, 0)
    assert await store.put_in_steps(b"a", made, "a") is stored


async def test_what_is_being_put_can_be_cancelled_and_is_not_overwritten() -> None:
    store = EmbeddingStore(8 << 20)
    putting = asyncio.ensure_future(store.put_in_steps(b"a", tensor(5 << 20, 7), "a"))
    await asyncio.sleep(0)
    with pytest.raises(OverloadedError):
        store.put(b"b", tensor(4 << 20), "b")
    putting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await putting
    assert (store.used_bytes, store.pinned_bytes) == (0, 0)
    assert store.put(b"c", tensor(8 << 20), "c").offset == 0


async def test_the_same_tensor_put_twice_at_once_is_kept_once() -> None:
    store = EmbeddingStore(16 << 20)
    made = tensor(5 << 20, 7)
    first, second = await asyncio.gather(*(store.put_in_steps(b"a", made, "a") for _ in range(2)))
    assert first is second
    assert store.used_bytes == 5 << 20
    assert store.put(b"b", tensor(11 << 20), "b").offset == 5 << 20
