"""The worker's KV event log: its readers know what the engine told, however they read."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator

import pytest

from millstream.v1 import kv_events_pb2
from millstream_server.kv_cache.events import (
    BlocksRemoved,
    BlocksStored,
    CacheCleared,
    KvChanges,
    KvEvent,
    KvMessage,
    KvPosition,
    KvSnapshotPart,
    Medium,
)
from millstream_server.protobuf.kv_events import kv_message_from_proto, kv_message_to_proto
from millstream_server.worker.kv_events.blocks import MAX_EVENTS, MESSAGE_HASHES
from millstream_server.worker.kv_events.log import KvEventLog, LogReader, RankLog

OPERATIONS = 10_000
RING = 2000
HABITS = ((0.9, 0.3), (0.3, 0.003), (0.05, 0.1))
"""How often a reader reads, and how often a disconnected one connects, per operation."""
MIB = 1 << 20

Cached = dict[int, set[Medium]]


def change(cached: Cached, event: KvEvent) -> None:
    """Do to a plain set what an event says."""
    if isinstance(event, CacheCleared):
        cached.clear()
    elif isinstance(event, BlocksStored):
        for block in event.hashes:
            cached.setdefault(block, set()).add(event.medium)
    else:
        for block in event.hashes:
            if block in cached:
                cached[block].discard(event.medium)
                if not cached[block]:
                    del cached[block]


class TreeCache:
    """A prefix cache that evicts leaves, and its random events: some doubled, some of no effect."""

    def __init__(self, seed: int) -> None:
        self.cached: Cached = {}
        self.random = random.Random(seed)
        self._parents: dict[int, int | None] = {}
        self._children: dict[int, set[int]] = {}
        self._seen: list[int] = []

    def event(self) -> KvEvent:
        dice = self.random.random()
        if dice < 0.001:
            event: KvEvent = CacheCleared()
            self._seen.clear()
        elif dice < 0.55:
            event = self._store()
        else:
            event = self._remove()
        change(self.cached, event)
        return event

    def _store(self) -> BlocksStored:
        """Store a path's last blocks: known ones, and one to six new ones below them."""
        known = self._path()
        new = [self.random.getrandbits(64) for _ in range(self.random.randint(1, 6))]
        path = known + new
        for parent, block in zip([None, *path], path, strict=False):
            self._parents[block] = parent
            self._seen.append(block)
            if parent is not None:
                self._children.setdefault(parent, set()).add(block)
        start = self.random.randint(0, len(known))
        medium = self.random.choice([Medium.DEVICE] * 4 + [Medium.HOST])
        adapter = "sql" if path[0] % 5 == 0 else ""
        return BlocksStored(path[start:], self._parents[path[start]], medium, adapter)

    def _path(self) -> list[int]:
        """Return a random cached block and its ancestors, the first block first; or nothing."""
        block = self._any()
        path: list[int] = []
        while block is not None:
            path.append(block)
            block = self._parents[block]
        path.reverse()
        return path

    def _any(self) -> int | None:
        """Return a random cached block; at times none."""
        if self.random.random() < 0.2:
            return None
        some = self.random.choices(self._seen, k=20) if self._seen else []
        return next((block for block in some if block in self.cached), None)

    def _remove(self) -> BlocksRemoved:
        """Remove leaves from a medium, with a block that isn't there."""
        some = {self._any() for _ in range(8)} - {None}
        leaves = [
            b
            for b in some
            if b is not None and self._children.get(b, set()).isdisjoint(self.cached)
        ]
        medium = self.random.choice([Medium.DEVICE] * 4 + [Medium.HOST])
        return BlocksRemoved([*leaves, self.random.getrandbits(64)], medium)


class Reader:
    """One that follows a log as kv_events.proto says, over streams that break."""

    def __init__(self, log: RankLog) -> None:
        self.log = log
        self.cached: Cached = {}
        self.snapshots = 0
        self.unordered = 0
        self.position: KvPosition | None = None
        self.stream: LogReader | None = None
        self._parts: list[BlocksStored] = []

    def connect(self) -> None:
        """Open a stream from the own position on."""
        self._parts = []
        self.stream = LogReader(self.log, self.position, part_bytes=4096)

    def disconnect(self) -> None:
        """Lose the stream, and an incomplete snapshot with it."""
        if self.stream is not None:
            self.stream.close()
            self.stream = None

    def read(self, messages: int) -> int:
        """Read at most so many messages; return how many there were."""
        assert self.stream is not None
        for count in range(messages):
            message = self.stream.read()
            if message is None:
                return count
            self._take(over_the_wire(message))
        return messages

    def _take(self, message: KvMessage) -> None:
        content = message.content
        if isinstance(content, KvChanges):
            at = self.position
            assert at is not None
            assert (message.log_id, content.first_sequence) == (at.log_id, at.sequence + 1)
            for event in content.events:
                change(self.cached, event)
        else:
            self._parts = [*(() if content.first else self._parts), *content.stored]
            if not content.last:
                return
            self._replace(self._parts)
        self.position = KvPosition(message.dp_rank, message.log_id, message.sequence)

    def _replace(self, stored: Iterable[BlocksStored]) -> None:
        self.snapshots += 1
        self.cached.clear()
        for event in stored:
            self.unordered += event.parent is not None and event.parent not in self.cached
            change(self.cached, event)


def over_the_wire(message: KvMessage) -> KvMessage:
    """Send a message as bytes."""
    sent = kv_message_to_proto(message).SerializeToString()
    assert len(sent) <= MIB
    return kv_message_from_proto(kv_events_pb2.WatchKvEventsResponse.FromString(sent))


def held_changes(log: RankLog) -> int:
    """Return how many entries are held because snapshots are read."""
    blocks = log._blocks
    return len(blocks._parents._changes or ()) + len(blocks._kinds._changes or ())


def test_readers_know_what_the_engine_told_after_any_operations() -> None:
    engine, log = TreeCache(1), KvEventLog(RING)
    rank = log.rank(0)
    readers = [Reader(rank) for _ in range(3)]
    chance = engine.random
    for _ in range(OPERATIONS):
        log.changed(0, [engine.event() for _ in range(chance.randint(1, 3))])
        for reader, (reads, connects) in zip(readers, HABITS, strict=True):
            if reader.stream is None:
                if chance.random() < connects:
                    reader.connect()
            elif chance.random() < 0.01:
                reader.disconnect()
            elif chance.random() < reads:
                reader.read(chance.randint(1, 4))
        assert rank.ring.hashes <= RING
        assert held_changes(rank) <= RING
    for reader in (*readers, Reader(rank)):
        if reader.stream is None:
            reader.connect()
        while reader.read(100):
            pass
        assert reader.cached == engine.cached
        assert reader.unordered == 0
        reader.disconnect()
    assert held_changes(rank) == 0
    assert readers[1].snapshots > 2  # the ring passed it


def test_a_snapshot_is_of_one_moment_and_is_begun_anew_when_the_ring_has_passed_it() -> None:
    log = RankLog(0, 1024)
    log.changed([BlocksStored(range(100_000))])
    reader = LogReader(log, None)
    first = reader.read()
    assert first is not None
    assert first.sequence == log.ring.last
    log.changed([BlocksRemoved(range(100)), BlocksStored([1 << 40])])
    rest = list(_all_of(reader))
    parts = [m.content for m in (first, *rest) if isinstance(m.content, KvSnapshotPart)]
    assert len(parts) > 5
    assert [part.last for part in parts] == [False] * (len(parts) - 1) + [True]
    assert {b for part in parts for s in part.stored for b in s.hashes} == set(range(100_000))
    assert isinstance(rest[-1].content, KvChanges)
    assert (rest[-1].content.first_sequence, rest[-1].sequence) == (first.sequence + 1,) * 2
    slow = LogReader(log, None)
    slow.read()
    for block in range(1025):
        log.changed([BlocksRemoved([block + 200])])
    anew = slow.read()
    assert anew is not None
    assert isinstance(anew.content, KvSnapshotPart)
    assert anew.content.first
    assert anew.sequence == log.ring.last


def test_a_stalled_reader_of_a_snapshot_holds_nothing_once_the_ring_has_passed_it() -> None:
    log = RankLog(0, 1024)
    log.changed([BlocksStored(range(100_000))])
    stalled = [LogReader(log, None) for _ in range(20)]
    for reader in stalled:
        reader.read()
    log.changed([BlocksRemoved(range(1000))])
    assert held_changes(log) == 1000
    log.changed([BlocksRemoved(range(1000, 2000))])
    assert held_changes(log) == 0


def test_a_cleared_cache_ends_the_snapshots_of_what_it_held() -> None:
    log = RankLog(0, 1024)
    log.changed([BlocksStored(range(100_000))])
    reader = LogReader(log, None)
    reader.read()
    log.changed([CacheCleared(), BlocksStored([5])])
    message = reader.read()
    assert message is not None
    assert message.content == KvSnapshotPart(first=True, last=True, stored=[BlocksStored([5])])
    assert message.sequence == log.ring.last


def test_messages_are_at_most_a_mebibyte_whatever_an_engine_tells() -> None:
    blocks = range(1 << 60, (1 << 60) + 140_000)
    small = [BlocksStored([i], i - 1 if i else None, adapter="a" * 200) for i in range(4500)]
    for events in ([BlocksStored(blocks, 7)], small, [BlocksRemoved(blocks)], [CacheCleared()]):
        log = RankLog(0, 1 << 20)
        log.changed([BlocksStored(blocks), BlocksStored(range(10), adapter="b" * 200)])
        follower = LogReader(log, KvPosition(0, log.log_id, log.ring.last))
        log.changed(events)
        expected: Cached = {b: {Medium.DEVICE} for b in (*blocks, *range(10))}
        cached = {block: set(media) for block, media in expected.items()}
        for event in events:
            change(expected, event)
        for message in map(over_the_wire, _all_of(follower)):
            assert isinstance(message.content, KvChanges)
            for event in message.content.events:
                change(cached, event)
        assert cached == expected
        anew: Cached = {}
        for message in map(over_the_wire, _all_of(LogReader(log, None))):
            assert isinstance(message.content, KvSnapshotPart)
            for stored in message.content.stored:
                change(anew, stored)
        assert anew == expected


def test_a_long_chain_that_is_cut_keeps_its_parents() -> None:
    log = RankLog(0, 1 << 20)
    log.changed([BlocksStored(range(MESSAGE_HASHES + 5), 77)])
    reader = LogReader(log, KvPosition(0, log.log_id, 0))
    events = [
        e for m in _all_of(reader) if isinstance(m.content, KvChanges) for e in m.content.events
    ]
    parents = [(e.parent, len(e.hashes)) for e in events if isinstance(e, BlocksStored)]
    assert parents == [(77, MESSAGE_HASHES), (MESSAGE_HASHES - 1, 5)]
    assert log.ring.last == 2


def test_the_ring_is_bounded_in_events_too() -> None:
    log = RankLog(0, 1 << 20)
    for _ in range(MAX_EVENTS // 8 + 1):
        log.changed([CacheCleared()] * 8)
    assert log.ring.events == MAX_EVENTS
    assert not log.ring.reaches(0)


@pytest.mark.parametrize(
    ("log_id", "sequence", "goes_on"),
    [("", 0, True), ("", 2, True), ("", 4, False), ("another", 1, False)],
)
def test_a_position_is_taken_up_only_if_the_log_has_what_follows(
    log_id: str, sequence: int, *, goes_on: bool
) -> None:
    log = RankLog(0, 1024)
    for block in range(3):
        log.changed([BlocksStored([block])])
    message = LogReader(log, KvPosition(0, log_id or log.log_id, sequence)).read()
    assert message is not None
    assert isinstance(message.content, KvChanges) is goes_on
    assert message.sequence == 3


def _all_of(reader: LogReader) -> Iterator[KvMessage]:
    while (message := reader.read()) is not None:
        yield message
