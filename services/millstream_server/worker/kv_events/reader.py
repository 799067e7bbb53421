"""A reader of one rank's log: a position, and at times a snapshot."""

from __future__ import annotations

from millstream_server.kv_cache.events import BlocksStored
from millstream_server.kv_cache.messages import KvChanges, KvMessage, KvPosition, KvSnapshotPart
from millstream_server.runtime.telemetry.metrics import KV_SNAPSHOTS
from millstream_server.worker.kv_events.log import RankLog, Snapshot

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
