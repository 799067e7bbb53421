"""Leases: granted, found, released, expired."""

from __future__ import annotations

import re

from millstream_server.encode.transfer.store import EmbeddingStore, Leases, Stored
from millstream_server.media.tensor import ElementType, Tensor, TensorSpec
from millstream_testing.waiting import until

SPEC = TensorSpec(ElementType.FLOAT32, (64,))


def stored(store: EmbeddingStore, digest: bytes = b"a") -> Stored:
    return store.put(digest, Tensor(SPEC, memoryview(bytes(256))), None)


async def test_a_lease_keeps_its_tensor_until_it_is_released() -> None:
    store, ended = EmbeddingStore(256), list[int]()
    leases = Leases(store, 60, on_ended=lambda: ended.append(1))
    lease = leases.grant(stored(store), "stream")
    assert re.fullmatch("[0-9a-f]{32}", lease.name)
    assert leases.find(lease.name) is lease
    assert 59 < lease.left_s <= 60
    assert (len(leases), store.pinned_bytes) == (1, 256)
    leases.release(lease.name)
    leases.release(lease.name)
    assert ended == [1]
    assert leases.find(lease.name) is None
    assert (len(leases), store.pinned_bytes) == (0, 0)


async def test_two_leases_of_one_tensor() -> None:
    store = EmbeddingStore(256)
    leases = Leases(store, 60)
    one, other = (leases.grant(stored(store), "stream") for _ in range(2))
    assert one.name != other.name
    leases.release(one.name)
    assert store.pinned_bytes == 256
    leases.release(other.name)
    assert store.pinned_bytes == 0


async def test_a_stream_ends() -> None:
    store = EmbeddingStore(1024)
    leases = Leases(store, 60)
    gone = [leases.grant(stored(store, digest), "one") for digest in (b"a", b"b")]
    stays = leases.grant(stored(store, b"c"), "other")
    leases.release_all("one")
    leases.release_all("one")
    leases.release_all("unknown")
    assert [leases.find(lease.name) for lease in gone] == [None, None]
    assert leases.find(stays.name) is stays
    assert store.pinned_bytes == 256
    leases.close()
    assert store.pinned_bytes == 0


async def test_a_lease_expires_and_a_released_one_does_not() -> None:
    store, ended = EmbeddingStore(1024), list[int]()
    leases = Leases(store, 0.01, on_ended=lambda: ended.append(1))
    released = leases.grant(stored(store, b"a"), "stream")
    leases.release(released.name)
    lease = leases.grant(stored(store, b"b"), "stream")
    await until(lambda: len(ended) > 1)
    assert ended == [1, 1]
    assert leases.find(lease.name) is None
    assert lease.left_s == 0
    assert store.pinned_bytes == 0
