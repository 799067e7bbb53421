"""One rank's KV events, put together into its prefix cache's set; the rules of kv_events.proto."""

from __future__ import annotations

from millstream_server.kv_cache.events import BlocksStored
from millstream_server.kv_cache.messages import KvChanges, KvMessage, KvPosition, KvSnapshotPart
from millstream_server.routing.prefix.index import PrefixIndex


class RankReplica:
    """Keeps one member of an index equal to one rank's cache, over any number of streams.

    `position` is what the next stream begins with; None: with a snapshot.
    """

    def __init__(self, index: PrefixIndex, member: int) -> None:
        """Start without a position; ``member`` is the rank's number in the index."""
        self.position: KvPosition | None = None
        self._index = index
        self._member = member
        self._parts: list[BlocksStored] | None = None
        """The incomplete snapshot; None: none has begun."""
        self._collected = 0
        """About how many hashes it takes the memory of."""

    def forget(self) -> None:
        """Forget all that is known of the rank."""
        self.position = self._parts = None
        self._index.replace(self._member, ())

    def begin(self) -> None:
        """Prepare for a new stream: a snapshot that was not completed begins anew."""
        self._parts = None

    def take(self, message: KvMessage) -> bool:
        """Take a message of this rank; return False if messages before it are missing.

        The caller must then drop the stream and open a new one. `position` is None then.
        """
        content = message.content
        if isinstance(content, KvSnapshotPart):
            fits = self._collect(message, content)
        else:
            fits = self._follow(message, content)
        if not fits:
            self.position = self._parts = None
        return fits

    def _collect(self, message: KvMessage, part: KvSnapshotPart) -> bool:
        if part.first:
            self._parts, self._collected = [], 0
        if self._parts is None:
            return False
        # The index keeps no more blocks; so a snapshot without an end takes no more memory.
        if self._collected < self._index.max_blocks:
            self._parts += part.stored
            self._collected += sum(map(_size, part.stored))
        if part.last:
            self._index.replace(self._member, self._parts)
            self._parts = None
            self._arrive_at(message)
        return True

    def _follow(self, message: KvMessage, changes: KvChanges) -> bool:
        position = self.position
        if position is None or message.log_id != position.log_id:
            return False
        if message.sequence <= position.sequence:
            return True
        if changes.first_sequence > position.sequence + 1:
            return False
        self._index.apply(self._member, changes.events)
        self._arrive_at(message)
        return True

    def _arrive_at(self, message: KvMessage) -> None:
        self.position = KvPosition(message.dp_rank, message.log_id, message.sequence)


def _size(stored: BlocksStored) -> int:
    return len(stored.hashes) + len(stored.adapter) // 8 + 1
