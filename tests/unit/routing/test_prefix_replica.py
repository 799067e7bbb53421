"""A copy of a rank's cache stays equal to it, whatever happens to the messages on the way."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from millstream_server.engines.simulated.prefix_cache import PrefixCache
from millstream_server.kv_cache.events import (
    BlocksStored,
    CacheCleared,
    KvChanges,
    KvEvent,
    KvMessage,
    KvPosition,
    KvSnapshotPart,
)
from millstream_server.kv_cache.hashing import block_hashes
from millstream_server.links.kv_watch import RankReplica
from millstream_server.routing.prefix.index import PrefixIndex
from millstream_server.worker.kv_events.log import LogReader, RankLog


def _replica() -> tuple[PrefixIndex, RankReplica]:
    index = PrefixIndex()
    return index, RankReplica(index, index.join())


def _events(first: int, last: int, *events: KvEvent, log: str = "log") -> KvMessage:
    return KvMessage(0, log, last, KvChanges(first, events))


def _part(*hashes: int, first: bool = False, last: bool = False, sequence: int = 0) -> KvMessage:
    stored = (BlocksStored(hashes),)
    return KvMessage(0, "log", sequence, KvSnapshotPart(first, last, stored))


def test_a_snapshot_counts_when_it_is_complete() -> None:
    index, replica = _replica()
    assert replica.take(_part(1, first=True, last=True, sequence=4))
    assert replica.take(_part(2, first=True, sequence=6))
    assert index.held(0) == {1}
    assert replica.position == KvPosition(0, "log", 4)
    assert replica.take(_part(3, last=True, sequence=6))
    assert index.held(0) == {2, 3}
    assert replica.position == KvPosition(0, "log", 6)


def test_a_snapshot_that_a_new_stream_begins_anew_has_nothing_of_the_old_one() -> None:
    index, replica = _replica()
    assert replica.take(_part(1, first=True))
    replica.begin()
    assert not replica.take(_part(2, last=True))
    assert index.held(0) == set()
    assert replica.take(_part(3, first=True))
    assert replica.take(_part(4, first=True, last=True))
    assert index.held(0) == {4}


def test_a_snapshot_without_an_end_takes_no_more_memory_than_the_index_may() -> None:
    index = PrefixIndex(max_blocks=10)
    replica = RankReplica(index, index.join())
    assert replica.take(_part(first=True))
    for number in range(0, 1000, 4):
        assert replica.take(_part(*range(number, number + 4)))
    assert replica._parts is not None
    assert sum(len(stored.hashes) for stored in replica._parts) == 8
    assert replica.take(_part(last=True, sequence=5))
    assert index.held(0) <= set(range(8))
    assert replica.position == KvPosition(0, "log", 5)


@pytest.mark.parametrize(
    "message",
    [_events(7, 7, CacheCleared()), _events(6, 6, CacheCleared(), log="another")],
    ids=["missing", "restarted"],
)
def test_messages_that_do_not_follow_are_refused(message: KvMessage) -> None:
    index, replica = _replica()
    assert not replica.take(_events(1, 1, BlocksStored([9]))), "there was no snapshot"
    assert replica.take(_part(1, first=True, last=True, sequence=5))
    assert not replica.take(message)
    assert replica.position is None
    assert index.held(0) == {1}


def test_messages_that_are_known_change_nothing() -> None:
    index, replica = _replica()
    assert replica.take(_part(1, first=True, last=True, sequence=5))
    assert replica.take(_events(4, 5, CacheCleared()))
    assert index.held(0) == {1}
    assert replica.take(_events(5, 6, BlocksStored([2], parent=1)))
    assert index.held(0) == {1, 2}
    assert replica.position == KvPosition(0, "log", 6)


class _Worker:
    """An engine's prefix cache with its log; `restart` gives it new ones."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._prompts = [[rng.randrange(99) for _ in range(24)] for _ in range(6)]
        self.restart()

    def restart(self) -> None:
        self.log = RankLog(0, max_hashes=60)
        self.cache = PrefixCache(40, self.log.changed)

    def operate(self) -> None:
        """Run one request, or clear the cache."""
        rng = self._rng
        if rng.random() < 0.005:
            self.cache.clear()
            return
        tokens = rng.choice(self._prompts)[: rng.randrange(4, 24)]
        tokens = tokens + [rng.randrange(99) for _ in range(rng.randrange(0, 24))]
        hashes = block_hashes(tokens, 4)
        held = self.cache.acquire(hashes, len(hashes))
        assert held is not None
        self.cache.store(held, hashes)
        self.cache.release(held)


class _Way:
    """A reader's stream to a replica that loses, doubles and reorders events.

    Parts of snapshots aren't numbered, so of these only the rest of a stream can be lost.
    """

    def __init__(self, rng: random.Random, worker: _Worker, replica: RankReplica) -> None:
        self._rng, self._worker, self._replica = rng, worker, replica
        self.resyncs = 0
        self.open()

    def open(self) -> None:
        """Open a new stream at the replica's position."""
        self._replica.begin()
        self._reader = LogReader(self._worker.log, self._replica.position, part_bytes=200)

    def catch_up(self) -> None:
        """Read to the end without faults, from a new message on: it shows what was lost before."""
        last = self._worker.log.ring.last
        while self._worker.log.ring.last == last:
            self._worker.operate()
        while not self.read(1000, faults=0.0):
            pass

    def read(self, messages: int, faults: float) -> bool:
        """Pass messages on; return whether all there were have arrived."""
        waiting: list[KvMessage] = []
        for _ in range(messages):
            message = self._reader.read()
            if message is None:
                return self._deliver(waiting)
            waiting += self._disturbed(message, faults)
            if self._rng.random() < 0.5:
                if not self._deliver(waiting):
                    return False
                waiting = []
        self._deliver(waiting)
        return False

    def _disturbed(self, message: KvMessage, faults: float) -> Sequence[KvMessage]:
        if isinstance(message.content, KvSnapshotPart) or self._rng.random() >= faults:
            return [message]
        return self._rng.choice([[], [message, message]])

    def _deliver(self, messages: list[KvMessage]) -> bool:
        changes = all(isinstance(message.content, KvChanges) for message in messages)
        if changes and self._rng.random() < 0.1:
            self._rng.shuffle(messages)
        for message in messages:
            if not self._replica.take(message):
                self.resyncs += 1
                self._reader.close()
                self.open()
                return False
        return True


def test_a_copy_equals_the_cache_after_10_000_operations_with_faults_on_the_way() -> None:
    rng = random.Random(11)
    worker = _Worker(rng)
    index, replica = _replica()
    way = _Way(rng, worker, replica)
    compared = slow = 0
    for _ in range(10_000):
        worker.operate()
        what = rng.random()
        if what < 0.002:
            worker.restart()
            way.open()
        elif what < 0.01:
            way.open()  # a connection broke, perhaps in the middle of a snapshot
        elif what < 0.5:
            way.read(rng.randrange(1, 4), faults=0.05)
        elif what < 0.51:
            slow += 1
            for _ in range(30):  # a consumer that reads nothing for a while
                worker.operate()
        elif what < 0.55:
            way.catch_up()
            assert index.held(0) == set(worker.cache.hashes)
            compared += 1
    way.catch_up()
    assert index.held(0) == set(worker.cache.hashes)
    assert compared > 300
    assert way.resyncs > 100, "no fault was noticed"
    assert slow > 50
