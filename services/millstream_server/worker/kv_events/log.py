"""What the engine's prefix caches hold, and how that changed: one log per data-parallel rank.

A log is the current set and a ring of the last messages. Readers (`LogReader`) have a
position only, so any number of them costs no memory here, however slow they are. Memory per rank:

- the set: 80 to 110 bytes per cached block (`CachedBlocks`);
- the ring: 8 bytes per hash (`MessageRing`);
- while snapshots are read: 80 to 110 bytes per block that changed since the oldest of them began.
  They share one frozen set. They are given up once the ring has lost a message after them, so this
  is at most one entry per hash in the ring, for all readers together.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence

from millstream_server.kv_cache.events import (
    BlocksRemoved,
    BlocksStored,
    CacheCleared,
    KvChanges,
    KvEvent,
    KvMessage,
    KvPosition,
    KvSnapshotPart,
)
from millstream_server.runtime.telemetry.metrics import KV_CACHED_BLOCKS, KV_EVENTS, KV_SNAPSHOTS
from millstream_server.worker.kv_events.blocks import DEFAULT_BUFFER, CachedBlocks, MessageRing

_NAMES = {BlocksStored: "stored", BlocksRemoved: "removed", CacheCleared: "cleared"}
_CHAIN_HASHES = 4096  # longest chain in a snapshot: a part is cut between chains


class Snapshot:
    """One reader's way through a rank's whole set, as it was after the message `sequence`."""

    def __init__(
        self, sequence: int, chains: Iterator[BlocksStored], on_close: Callable[[Snapshot], None]
    ) -> None:
        self.sequence = sequence
        self._chains: Iterator[BlocksStored] | None = chains
        self._on_close = on_close

    @property
    def valid(self) -> bool:
        """Whether it can be read on; if not, take another one."""
        return self._chains is not None

    def next(self) -> BlocksStored | None:
        """Return the next chain; None: that was all."""
        return next(self._chains, None) if self._chains is not None else None

    def close(self) -> None:
        """End it; also lets the log go on without the frozen set, if this was its last reader."""
        if self._chains is not None:
            self._chains = None
            self._on_close(self)


class RankLog:
    """The log of one rank. Everything runs on one event loop."""

    def __init__(self, dp_rank: int, max_hashes: int) -> None:
        """Start empty, with the message 1 to come."""
        self.dp_rank = dp_rank
        self.log_id = secrets.token_hex(8)
        """Random: positions of an earlier process are recognised."""
        self.ring = MessageRing(max_hashes)
        self._blocks = CachedBlocks()
        self._snapshots: set[Snapshot] = set()
        self._frozen_at = 0
        self._listeners: set[Callable[[], None]] = set()
        self._gauge = KV_CACHED_BLOCKS.labels(str(dp_rank))
        self._gauge.set(0)

    def changed(self, events: Sequence[KvEvent]) -> None:
        """Take over changes and wake readers."""
        for event in events:
            if isinstance(event, CacheCleared):
                self._give_up_snapshots()
            self._blocks.apply(event)
        self.ring.add(events)
        if self._snapshots and not self.ring.reaches(self._frozen_at):
            self._give_up_snapshots()
        self._gauge.set(len(self._blocks))
        for listener in tuple(self._listeners):
            listener()

    def snapshot(self) -> Snapshot:
        """Return a snapshot that the ring's messages continue; its reader must close it."""
        if not self._snapshots:
            self._frozen_at = self.ring.last
        chains = self._blocks.freeze(_CHAIN_HASHES)
        snapshot = Snapshot(self._frozen_at, chains, self._closed)
        self._snapshots.add(snapshot)
        return snapshot

    def listen(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call ``listener`` after each change; return the function that removes it."""
        self._listeners.add(listener)
        return lambda: self._listeners.discard(listener)

    def _give_up_snapshots(self) -> None:
        for snapshot in tuple(self._snapshots):
            snapshot.close()

    def _closed(self, snapshot: Snapshot) -> None:
        self._snapshots.discard(snapshot)
        if not self._snapshots:
            self._blocks.thaw()


class KvEventLog:
    """The logs of all ranks; satisfies `kv_cache.events.KvEventSink`."""

    def __init__(self, max_hashes: int = DEFAULT_BUFFER) -> None:
        """Keep ``max_hashes`` hashes of events per rank."""
        self._max_hashes = max_hashes
        self._ranks: dict[int, RankLog] = {}

    def rank(self, dp_rank: int) -> RankLog:
        """Return the log of a rank, numbered as in `GenerationRequest.dp_rank`."""
        if (log := self._ranks.get(dp_rank)) is None:
            log = self._ranks[dp_rank] = RankLog(dp_rank, self._max_hashes)
        return log

    def changed(self, dp_rank: int, events: Sequence[KvEvent]) -> None:
        """Receive changes of a rank's cache, in order."""
        for event in events:
            KV_EVENTS.labels(_NAMES[type(event)]).inc()
        self.rank(dp_rank).changed(events)


_PART_BYTES = 128 << 10  # 16,384 hashes take about 3 ms of the event loop
_CHAIN_BYTES = 64  # of a chain besides its hashes and its adapter


class LogReader:
    """Reads a log message by message, as `WatchKvEvents` sends them.

    A reader that is given a position of another log, or one that the ring doesn't reach any more,
    gets a snapshot; so does one that reads so slowly that the ring passes it. A snapshot is begun
    anew when the messages after it are gone before it is complete: a reader that takes longer for
    the set than the engine for `max_hashes` changes doesn't get to the end.
    """

    def __init__(
        self, log: RankLog, position: KvPosition | None, part_bytes: int = _PART_BYTES
    ) -> None:
        """Go on after ``position``; None: from the beginning."""
        self._log = log
        self._part_bytes = part_bytes
        self._snapshot: Snapshot | None = None
        self._ahead: BlocksStored | None = None  # the next chain of the snapshot
        if position is not None and position.log_id == log.log_id:
            self._position = position.sequence
        else:
            self._begin_snapshot("new" if position is None else "restarted")

    def read(self) -> KvMessage | None:
        """Return the next message; None: there is none now."""
        log = self._log
        stale = (
            not self._snapshot.valid
            if self._snapshot is not None
            else not log.ring.reaches(self._position)
        )
        if stale:
            self._begin_snapshot("slow")
        if self._snapshot is not None:
            return self._read_snapshot(self._snapshot)
        first = self._position + 1
        self._position, events = log.ring.after(self._position)
        if not events:
            return None
        return KvMessage(log.dp_rank, log.log_id, self._position, KvChanges(first, events))

    def close(self) -> None:
        """End it. May be called twice."""
        if self._snapshot is not None:
            self._snapshot.close()
            self._snapshot = None

    def _begin_snapshot(self, cause: str) -> None:
        KV_SNAPSHOTS.labels(cause).inc()
        self._snapshot = self._log.snapshot()
        self._first = True
        self._ahead = self._snapshot.next()

    def _read_snapshot(self, snapshot: Snapshot) -> KvMessage:
        stored: list[BlocksStored] = []
        nbytes = 0
        while self._ahead is not None and nbytes < self._part_bytes:
            stored.append(self._ahead)
            nbytes += 8 * len(self._ahead.hashes) + len(self._ahead.adapter) + _CHAIN_BYTES
            self._ahead = snapshot.next()
        first, self._first = self._first, False
        last = self._ahead is None
        if last:
            self._position = snapshot.sequence
            self.close()
        content = KvSnapshotPart(first, last, stored)
        return KvMessage(self._log.dp_rank, self._log.log_id, snapshot.sequence, content)
