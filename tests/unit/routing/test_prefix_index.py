"""Which members hold which blocks."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from millstream_server.kv_cache.events import (
    BlocksRemoved,
    BlocksStored,
    CacheCleared,
    KvEvent,
    Medium,
)
from millstream_server.routing.prefix import index as index_module
from millstream_server.routing.prefix.holdings import EXPECTED_S
from millstream_server.routing.prefix.index import Overlap, PrefixIndex


def _index(*chains: Sequence[int], max_blocks: int = 10_000) -> PrefixIndex:
    """Make an index of one member per chain."""
    index = PrefixIndex(max_blocks)
    for chain in chains:
        index.apply(index.join(), [BlocksStored(chain)])
    return index


def test_each_member_is_found_with_the_blocks_that_it_holds_from_the_first_on() -> None:
    index = _index([1, 2, 3], [1, 2, 9], [2, 3], [1, 2, 3, 4], [1, 2, 3])
    prompt = [1, 2, 3, 4, 5]
    assert index.overlaps(prompt) == [Overlap(4, 1 << 3), Overlap(3, 0b10001), Overlap(2, 1 << 1)]
    assert index.overlaps([7, 1]) == []
    assert index.overlaps([]) == []
    assert index.overlaps([1]) == [Overlap(1, 0b11011)]


def test_a_block_in_two_media_is_held_until_it_is_in_none() -> None:
    index = _index([1, 2])
    index.apply(0, [BlocksStored([1], medium=Medium.HOST)])
    index.apply(0, [BlocksRemoved([1, 2, 8])])
    assert index.held(0) == {1}
    index.apply(0, [BlocksRemoved([1], medium=Medium.DISK)])
    assert index.held(0) == {1}
    index.apply(0, [BlocksRemoved([1], medium=Medium.HOST)])
    assert index.held(0) == set()
    assert index.blocks == 0


def test_a_member_that_leaves_takes_its_blocks_along_and_gives_its_number_to_the_next() -> None:
    index = _index([1], [1, 2], [1])
    index.expect(1, [1, 2, 3], 2)
    index.leave(1)
    assert index.overlaps([1, 2, 3]) == [Overlap(1, 0b101)]
    assert index.blocks == 2
    assert index.join() == 1
    assert index.held(1) == set()
    assert index.overlaps([1, 2, 3]) == [Overlap(1, 0b101)]


def test_a_cleared_cache_is_empty_and_a_replaced_one_holds_what_it_was_given() -> None:
    index = _index([1, 2], [1, 2])
    index.replace(0, [BlocksStored([7]), BlocksStored([8], parent=7)])
    assert index.held(0) == {7, 8}
    assert index.overlaps([1, 2]) == [Overlap(2, 0b10)]
    index.apply(1, [CacheCleared(), BlocksStored([5])])
    assert index.overlaps([1, 2]) == []
    assert index.held(1) == {5}


def test_beyond_its_share_a_member_loses_what_was_used_for_longest_and_no_parents() -> None:
    index = _index([1, 2], [], max_blocks=40)  # a share is 20 blocks
    for number in range(10, 100, 3):
        # The parent of the first one is used again and again; the second one never.
        index.apply(0, [BlocksStored([number, number + 1], parent=1)])
        index.apply(0, [BlocksStored([number + 2], parent=number + 1)])
        assert len(index.held(0)) <= 20
    assert index.overlaps([1, 97, 98, 99]) == [Overlap(4, 1)]
    assert index.overlaps([1, 2]) == [Overlap(1, 1)]
    assert index.overlaps([1, 10]) == [Overlap(1, 1)]
    assert index.blocks == len(index.held(0)) >= 10


def test_a_prompt_that_was_sent_to_a_member_counts_there_for_a_while() -> None:
    time_s = 0.0
    index = PrefixIndex(now=lambda: time_s)
    index.apply(index.join(), [BlocksStored([1])])
    index.join()
    index.expect(0, [1, 2, 3], 1)
    index.expect(1, [1, 2], 0)
    assert index.overlaps([1, 2, 3]) == [Overlap(3, 0b01), Overlap(2, 0b10)]
    assert index.held(0) == {1}
    index.apply(1, [BlocksStored([1, 2])])
    time_s = EXPECTED_S + 1
    index.expect(0, [8], 0)
    assert index.overlaps([1, 2, 3]) == [Overlap(2, 0b10), Overlap(1, 0b01)]


def test_expected_blocks_are_bounded_too() -> None:
    index = PrefixIndex(max_blocks=40)
    index.join()
    for first in range(0, 100, 5):
        index.expect(0, list(range(first, first + 5)), 0)
    assert index.overlaps([95, 96]) == [Overlap(2, 1)]
    assert index.overlaps([85, 86]) == []


# ---- work in parts


def test_a_large_cache_is_stored_and_cleared_in_parts() -> None:
    index = PrefixIndex()
    large, small = index.join(), index.join()
    chains = [range(at, at + 4096) for at in range(0, 40_960, 4096)]
    index.replace(large, [BlocksStored(chain) for chain in chains])
    assert len(index.held(large)) == 8192
    index.apply(small, [BlocksStored([7])])
    while index.work():
        pass
    assert index.held(large) == set(range(40_960))
    index.apply(large, [CacheCleared()])
    assert index.blocks == 1
    last = [40_959]
    assert index.overlaps(last) == [Overlap(1, 1 << large)], "not all is removed yet"
    index.leave(large)
    assert index.join() == 2, "the number would be found with blocks of the member that left"
    while index.work():
        pass
    assert index.overlaps(last) == []
    assert index.overlaps([7]) == [Overlap(1, 1 << small)]
    assert index.join() == large


@pytest.mark.parametrize("seed", range(4))
def test_in_the_end_parts_are_as_good_as_the_whole(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_module, "_BLOCKS_AT_ONCE", 3)
    rng = random.Random(seed)
    index = PrefixIndex()
    truth: dict[int, set[int]] = {index.join(): set() for _ in range(3)}

    def event(member: int) -> KvEvent:
        hashes = rng.sample(range(30), rng.randrange(1, 12))
        if rng.random() < 0.1:
            truth[member] = set()
            return CacheCleared()
        if rng.random() < 0.5:
            truth[member] |= set(hashes)
            return BlocksStored(hashes)
        truth[member] -= set(hashes)
        return BlocksRemoved(hashes)

    for _ in range(400):
        member = rng.choice(list(truth))
        if rng.random() < 0.05:
            index.leave(member)
            del truth[member]
            truth[index.join()] = set()
        else:
            index.apply(member, [event(member) for _ in range(rng.randrange(4))])
        if rng.random() < 0.2:
            while index.work():
                pass
            for block in range(30):
                found = sum(1 << m for m, held in truth.items() if block in held)
                assert index.overlaps([block]) == ([Overlap(1, found)] if found else [])
            assert all(index.held(m) == held for m, held in truth.items())
            assert index.blocks == sum(map(len, truth.values()))
