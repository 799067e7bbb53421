"""What a follower of KV events believes to be cached."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from millstream_server.kv_cache.events import (
    BlocksRemoved,
    BlocksStored,
    CacheCleared,
    KvEvent,
    Medium,
)


class KvView:
    """A `KvEventSink` that keeps each rank's blocks."""

    def __init__(self) -> None:
        """Know of no block."""
        self.ranks: dict[int, set[int]] = defaultdict(set)
        """Hashes in the engine's own cache."""
        self.elsewhere: dict[int, set[tuple[int, Medium]]] = defaultdict(set)
        self.adapters: dict[int, str] = {}
        """The adapter of each block that belongs to one."""
        self.cleared = 0

    def changed(self, dp_rank: int, events: Sequence[KvEvent]) -> None:
        """See `KvEventSink.changed`."""
        for event in events:
            self._apply(dp_rank, event)

    def _apply(self, dp_rank: int, event: KvEvent) -> None:
        here, elsewhere = self.ranks[dp_rank], self.elsewhere[dp_rank]
        match event:
            case CacheCleared():
                self.cleared += 1
                here.clear()
                elsewhere.clear()
            case BlocksStored(hashes, _, medium, adapter):
                if adapter:
                    self.adapters |= dict.fromkeys(hashes, adapter)
                if medium is Medium.DEVICE:
                    here.update(hashes)
                elsewhere.update((each, medium) for each in hashes)
            case BlocksRemoved(hashes, medium):
                if medium is Medium.DEVICE:
                    here.difference_update(hashes)
                elsewhere.difference_update((each, medium) for each in hashes)
