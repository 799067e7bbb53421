"""What a reader of a worker's KV event log gets, in plain types (`WatchKvEvents`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from millstream_server.kv_cache.events import BlocksStored, KvEvent


@dataclass(frozen=True, slots=True)
class KvPosition:
    """How far a reader has read a rank's log."""

    dp_rank: int
    log_id: str
    sequence: int
    """The last message that was read."""


@dataclass(frozen=True, slots=True)
class KvChanges:
    """Messages of a log, several in a row."""

    first_sequence: int
    """Number of the first of them."""
    events: Sequence[KvEvent]


@dataclass(frozen=True, slots=True)
class KvSnapshotPart:
    """A part of the whole set of cached blocks."""

    first: bool
    last: bool
    """Whether the snapshot is complete with it."""
    stored: Sequence[BlocksStored]


@dataclass(frozen=True, slots=True)
class KvMessage:
    """One message of the stream."""

    dp_rank: int
    log_id: str
    sequence: int
    """The reader's position after it; of a snapshot, once it is complete."""
    content: KvChanges | KvSnapshotPart
