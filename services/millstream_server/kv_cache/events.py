"""Changes of a prefix cache, the Protocol of an engine that tells them, and what readers get.

Readers are those of a worker's KV event log (`WatchKvEvents`).
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable


class Medium(enum.Enum):
    """Where a cached block is; the names are the contract's."""

    DEVICE = "device"
    """The engine's own KV cache."""
    HOST = "host"
    DISK = "disk"
    EXTERNAL = "external"


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """Blocks that are cached now, each the child of the one before; some may be known already."""

    hashes: Sequence[int]
    """Unsigned, 64 bits (`kv_cache.hashing`)."""
    parent: int | None = None
    """The block before the first; None: the first begins a prompt."""
    medium: Medium = Medium.DEVICE
    adapter: str = ""
    """The LoRA adapter they belong to; empty: the base model."""


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """Blocks that are no longer cached in a medium, in no order. Some may be unknown."""

    hashes: Sequence[int]
    medium: Medium = Medium.DEVICE


@dataclass(frozen=True, slots=True)
class CacheCleared:
    """No block is cached any more, in any medium."""


KvEvent = BlocksStored | BlocksRemoved | CacheCleared


class KvEventSink(Protocol):
    """Receives the events of an engine's caches, on the event loop; must not block or raise."""

    def changed(self, dp_rank: int, events: Sequence[KvEvent]) -> None:
        """Receive changes of a rank's cache, in order.

        If the source has missed changes, it sends `CacheCleared` and then what it knows to be
        cached. A block that is cached and not told costs speed only.
        """


@runtime_checkable
class KvEventSource(Protocol):
    """An engine that tells what its prefix caches hold.

    Order of calls: `follow_kv`, `Engine.start`; events come until `Engine.close`.
    """

    def follow_kv(self, sink: KvEventSink) -> None:
        """Send events to ``sink`` from the start on. Called once, before `Engine.start`."""


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
