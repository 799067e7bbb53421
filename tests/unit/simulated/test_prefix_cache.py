"""The simulated engine's prefix cache: what it keeps, what it evicts, what it tells."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream_server.engines.simulated.prefix_cache import HeldBlocks, PrefixCache
from millstream_server.kv_cache.events import (
    BlocksRemoved,
    BlocksStored,
    CacheCleared,
    KvEvent,
)
from millstream_server.kv_cache.hashing import Namespace, block_hashes, further_hashes


@dataclass
class Told:
    """Replays events, and checks that they make sense."""

    cached: dict[int, str] = field(default_factory=dict)
    events: list[KvEvent] = field(default_factory=list)

    def __call__(self, events: Sequence[KvEvent]) -> None:
        self.events += events
        for event in events:
            match event:
                case BlocksStored(hashes, parent, _, adapter):
                    assert parent is None or parent in self.cached
                    assert not self.cached.keys() & set(hashes), "only new blocks are told"
                    self.cached |= dict.fromkeys(hashes, adapter)
                case BlocksRemoved(hashes):
                    for hash_ in hashes:
                        del self.cached[hash_]
                case CacheCleared():
                    self.cached.clear()


def made(total_blocks: int) -> tuple[PrefixCache, Told]:
    told = Told()
    return PrefixCache(total_blocks, told), told


def run(cache: PrefixCache, hashes: Sequence[int], blocks: int | None = None) -> int:
    """Run a request alone; return how many of its blocks were cached."""
    held = cache.acquire(hashes, blocks or len(hashes))
    assert held is not None
    cache.store(held, hashes)
    cache.release(held)
    return held.cached


def test_blocks_stay_after_the_end_and_only_new_ones_are_told() -> None:
    cache, told = made(10)
    assert run(cache, [1, 2, 3]) == 0
    assert cache.used_blocks == 0
    assert run(cache, [1, 2, 3, 4]) == 3
    assert run(cache, [1, 2, 9]) == 2
    assert told.events == [
        BlocksStored((1, 2, 3)),
        BlocksStored((4,), 3),
        BlocksStored((9,), 2),
    ]
    assert [cache.count_cached(h) for h in ([1, 2, 3, 4, 5], [9], [], [1, 9])] == [4, 1, 0, 2]


def test_shared_blocks_count_once_and_doubles_are_free() -> None:
    cache, told = made(10)
    one, two = cache.acquire([1, 2], 4), cache.acquire([1, 2], 4)
    assert one is not None
    assert two is not None
    assert cache.used_blocks == 8
    cache.store(one, [1, 2])
    assert cache.used_blocks == 8
    cache.store(two, [1, 2, 3])
    assert cache.used_blocks == 6
    assert told.events == [BlocksStored((1, 2)), BlocksStored((3,), 2)]
    cache.release(one)
    assert cache.used_blocks == 4
    cache.release(two)
    cache.release(two)
    assert cache.used_blocks == 0


def test_the_least_recently_used_leaf_is_evicted_first() -> None:
    cache, told = made(6)
    run(cache, [1, 2, 3])
    run(cache, [1, 8])
    run(cache, [5, 6])
    run(cache, [1, 2, 3])
    told.events.clear()
    run(cache, [7])
    assert told.events == [BlocksRemoved((8,)), BlocksStored((7,))]
    run(cache, [10, 11, 12, 13])
    assert told.events[2] == BlocksRemoved((6, 5, 3, 2))
    assert set(cache.hashes) == {1, 7, 10, 11, 12, 13} == told.cached.keys()


def test_what_requests_use_is_not_evicted() -> None:
    cache, _ = made(4)
    held = cache.acquire([1, 2], 3)
    assert held is not None
    cache.store(held, [1, 2])
    assert cache.acquire([], 2) is None
    assert cache.acquire([1, 2, 3, 4, 5], 5) is None
    assert cache.used_blocks == 3
    other = cache.acquire([1, 2], 3)
    assert other is not None
    assert cache.used_blocks == 4
    with pytest.raises(ValueError, match="2 blocks to store, 1 are held"):
        cache.store(other, [1, 2, 3, 4])
    with pytest.raises(ValueError, match="4 blocks are in use"):
        cache.clear()
    cache.release(held)
    cache.release(other)
    with pytest.raises(ValueError, match="1 blocks to store"):
        cache.store(other, [1, 2, 3])
    assert run(cache, [9], 4) == 0
    assert set(cache.hashes) == {9}


def test_an_adapters_blocks_can_be_dropped_alone() -> None:
    cache, told = made(8)
    run(cache, [1, 2])
    held = cache.acquire([11, 12], 2, "poet")
    assert held is not None
    cache.store(held, [11, 12])
    cache.release(held)
    cache.forget_adapter("poet")
    cache.forget_adapter("nobody")
    assert told.events[1:] == [BlocksStored((11, 12), adapter="poet"), BlocksRemoved((11, 12))]
    assert run(cache, [21, 22, 23, 24, 25, 26, 27, 28]) == 0
    assert told.events[-2] == BlocksRemoved((2, 1))


_NAMESPACES = (Namespace(), Namespace("poet"), Namespace(salt="a"))
_OPERATION = st.tuples(
    st.sampled_from(["begin", "begin", "begin", "store", "end", "end", "forget", "clear"]),
    st.integers(0, 2),
    st.lists(st.integers(0, 1), max_size=9),
)


class Played:
    """A cache of 12 blocks under operations in any order."""

    def __init__(self) -> None:
        self.cache, self.told = made(12)
        self.running: list[tuple[HeldBlocks, list[int]]] = []

    def apply(self, operation: str, number: int, tokens: list[int]) -> None:
        if operation == "begin":
            namespace = _NAMESPACES[number]
            hashes = block_hashes(tokens, 1, namespace)
            expected = self.cache.count_cached(hashes)
            held = self.cache.acquire(hashes, len(tokens) + number, namespace.adapter)
            if held is None:
                assert self.running, "an idle cache has room"
                return
            assert held.cached == expected
            self.running.append((held, hashes))
        elif operation in {"store", "end"} and self.running:
            place = number % len(self.running)
            held, hashes = self.running[place]
            self.cache.store(held, hashes if operation == "end" else hashes[: len(tokens)])
            if operation == "end":
                self.cache.release(held)
                del self.running[place]
        elif operation == "clear" and not self.running:
            self.cache.clear()
        elif operation == "forget" and not any(held.adapter for held, _ in self.running):
            self.cache.forget_adapter("poet")
            assert "poet" not in self.told.cached.values()

    def check(self) -> None:
        cached = set(self.cache.hashes)
        assert cached == self.told.cached.keys()
        used = self.cache.used_blocks
        assert used <= 12
        in_use = {hash_ for held, hashes in self.running for hash_ in hashes[: held.depth]}
        assert in_use <= cached, "what is in use stays"
        private = sum(held.private for held, _ in self.running)
        assert used == len(in_use) + private
        assert len(cached) + private <= 12


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(_OPERATION, min_size=50, max_size=100))
def test_events_replayed_are_the_cache(operations: list[tuple[str, int, list[int]]]) -> None:
    played = Played()
    for operation in operations:
        played.apply(*operation)
        played.check()


def test_hashes_can_be_computed_piece_by_piece() -> None:
    tokens, namespace = list(range(50)), Namespace("poet", "salt")
    first, digest = further_hashes(namespace.digest(), tokens[:11], 4)
    further, _ = further_hashes(digest, tokens[8:], 4)
    assert first + further == block_hashes(tokens, 4, namespace)
