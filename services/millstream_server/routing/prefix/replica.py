"""One rank's KV events, put together into what its prefix cache holds; the rules of kv_events.proto."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from millstream_server.kv_cache.events import BlocksStored, KvEvent


@dataclass(frozen=True, slots=True)
class Position:
    """How far a rank's log was read."""

    log_id: str
    sequence: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EventsMessage:
    """One message of a rank's log, or several in a row."""

    log_id: str
    first_sequence: int
    sequence: int
    events: Sequence[KvEvent]


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotMessage:
    """A part of a rank's whole set."""

    log_id: str
    sequence: int
    first: bool
    last: bool
    stored: Sequence[BlocksStored]


KvMessage = EventsMessage | SnapshotMessage


@dataclass(frozen=True, slots=True)
class CacheUpdates:
    """Where a replica writes to."""

    apply: Callable[[Iterable[KvEvent]], None]
    replace: Callable[[Iterable[BlocksStored]], None]


class RankReplica:
    """Follows one rank through any number of streams.

    `position` is what a new stream begins with; None: with a snapshot.
    """

    def __init__(self, updates: CacheUpdates) -> None:
        """Start without a position; changes go to ``updates``."""
        self.position: Position | None = None
        self._updates = updates
        self._parts: list[BlocksStored] | None = None
        """The incomplete snapshot; None: none has begun."""

    def begin(self) -> None:
        """Prepare for a new stream: a snapshot that wasn't completed is begun anew."""
        self._parts = None

    def take(self, message: KvMessage) -> bool:
        """Take a message; return False if messages are missing.

        The caller then drops the stream and opens a new one; the rank has no position any more.
        """
        if isinstance(message, SnapshotMessage):
            fits = self._collect(message)
        else:
            fits = self._follow(message)
        if not fits:
            self.position = self._parts = None
        return fits

    def _collect(self, part: SnapshotMessage) -> bool:
        if part.first:
            self._parts = []
        if self._parts is None:
            return False
        self._parts += part.stored
        if part.last:
            self._updates.replace(self._parts)
            self._parts = None
            self.position = Position(part.log_id, part.sequence)
        return True

    def _follow(self, message: EventsMessage) -> bool:
        position = self.position
        if position is None or message.log_id != position.log_id:
            return False
        if message.sequence <= position.sequence:
            return True
        if message.first_sequence > position.sequence + 1:
            return False
        self._updates.apply(message.events)
        self.position = Position(position.log_id, message.sequence)
        return True
