"""A prefix cache: KV blocks by hash, shared by requests and kept after their end.

A block's hash covers all blocks before it (`kv_cache.hashing`), so the cache is a set of trees: a
block is only cached while the one before it is. When blocks run short, the least recently used one
that no request uses and no cached block follows is evicted.

It has no clock and no event loop, and the same calls give the same result, so that a routing study
can run many of them in virtual time:

    held = cache.acquire(hashes, blocks)  # None: no room, try again after a release
    ...                                   # compute all but the first `held.cached` blocks
    cache.store(held, hashes)             # the prompt is computed
    ...                                   # generate
    cache.store(held, longer_hashes)      # with the output's full blocks
    cache.release(held)

Every call takes time proportional to the blocks that change; finding a prefix takes the logarithm
of its length.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Callable, KeysView, Sequence
from dataclasses import dataclass

from millstream_server.kv_cache.events import (
    BlocksRemoved,
    BlocksStored,
    CacheCleared,
    KvEvent,
)

Tell = Callable[[Sequence[KvEvent]], None]


class _Block:
    """A cached block. ``uses`` counts requests that end with it, and children that are in use."""

    __slots__ = ("adapter", "children", "hash", "last_use", "parent", "queued", "serial", "uses")

    def __init__(self, hash_: int, parent: _Block | None, adapter: str, serial: int) -> None:
        self.hash = hash_
        self.parent = parent or self
        self.adapter = adapter
        self.serial = serial
        self.children = 0
        self.uses = 0
        self.last_use = serial
        self.queued = False
        """Whether it has an entry in the queue for eviction."""


@dataclass(slots=True, eq=False)
class HeldBlocks:
    """The blocks of one running request."""

    cached: int
    """Blocks of its prompt that were cached when it came."""
    adapter: str
    last: _Block
    """The last of its blocks that is cached; the cache's root if none is."""
    depth: int
    """How many of its blocks are cached."""
    private: int
    """How many of its blocks aren't cached."""
    open: bool = True


class PrefixCache:
    """The KV blocks of one data-parallel rank: cached ones, and private ones of requests."""

    def __init__(self, total_blocks: int, tell: Tell | None = None) -> None:
        """Start empty; ``tell`` receives the events of each change."""
        self.total_blocks = total_blocks
        self._tell = tell
        self._blocks: dict[int, _Block] = {}
        self._root = _Block(0, None, "", 0)
        self._root.uses = 1
        self._time = 0
        self._cached_in_use = 0
        self._private = 0
        # The blocks that could be evicted, by last use, with entries that are out of date: a block
        # that has been used since is queued anew when its entry comes up.
        self._evictable: list[tuple[int, int, _Block]] = []

    @property
    def used_blocks(self) -> int:
        """Blocks in use by requests; a block that several share counts once."""
        return self._private + self._cached_in_use

    @property
    def hashes(self) -> KeysView[int]:
        """The cached blocks."""
        return self._blocks.keys()

    def follow(self, tell: Tell) -> None:
        """Send the events of each change to ``tell`` from now on."""
        self._tell = tell

    def count_cached(self, hashes: Sequence[int]) -> int:
        """Return how many blocks from the first on are cached; nothing is changed."""
        blocks = self._blocks
        if not hashes or hashes[0] not in blocks:
            return 0
        if hashes[-1] in blocks:
            return len(hashes)
        return bisect_left(hashes, True, key=lambda hash_: hash_ not in blocks)  # noqa: FBT003

    def acquire(self, hashes: Sequence[int], blocks: int, adapter: str = "") -> HeldBlocks | None:
        """Take ``blocks`` blocks for a request, of which those of ``hashes`` may be cached.

        Others are evicted where necessary. None: there is no room while other requests run.
        """
        cached = self.count_cached(hashes)
        last = self._blocks[hashes[cached - 1]] if cached else self._root
        self._use(last)
        private = max(blocks - cached, 0)
        if self.used_blocks + private > self.total_blocks:
            self._disuse(last)
            return None
        short = self._private + private + len(self._blocks) - self.total_blocks
        self._private += private
        if short > 0:
            self._send(BlocksRemoved(tuple(self._evict(short))))
        return HeldBlocks(cached, adapter, last, cached, private)

    def store(self, held: HeldBlocks, hashes: Sequence[int]) -> None:
        """Cache a request's computed blocks; ``hashes`` are those of all, from the first on.

        Where another request has cached the same block meanwhile, the own one is free.

        Raises:
            ValueError: it has acquired fewer blocks, or has released them.
        """
        new = len(hashes) - held.depth
        if new <= 0:
            return
        if new > held.private or not held.open:
            raise ValueError(f"{new} blocks to store, {held.private} are held")
        blocks, before = self._blocks, held.last
        parent = last = before
        first = held.depth
        for hash_ in hashes[held.depth :]:
            block = blocks.get(hash_)
            if block is None:
                self._time += 1
                block = blocks[hash_] = _Block(hash_, last, held.adapter, self._time)
                last.children += 1
            else:
                first += 1
                parent = block
            last = block
        self._use(last)
        self._disuse(before)
        self._private -= new
        held.private -= new
        held.last, held.depth = last, len(hashes)
        if first < len(hashes) and self._tell is not None:
            parent_hash = None if parent is self._root else parent.hash
            self._send(BlocksStored(tuple(hashes[first:]), parent_hash, adapter=held.adapter))

    def release(self, held: HeldBlocks) -> None:
        """End a request's use of its blocks; the cached ones stay until they are evicted."""
        if not held.open:
            return
        held.open = False
        self._private -= held.private
        self._touch(held.last)
        self._disuse(held.last)

    def clear(self) -> None:
        """Remove every cached block.

        Raises:
            ValueError: requests use some.
        """
        if self.used_blocks:
            raise ValueError(f"{self.used_blocks} blocks are in use")
        self._blocks.clear()
        self._evictable.clear()
        self._send(CacheCleared())

    def forget_adapter(self, adapter: str) -> None:
        """Remove the cached blocks of an adapter, which no request uses."""
        gone = [block for block in self._blocks.values() if block.adapter == adapter]
        if not gone:
            return
        for block in gone:
            del self._blocks[block.hash]
        self._evictable = [entry for entry in self._evictable if entry[2].adapter != adapter]
        heapq.heapify(self._evictable)
        self._send(BlocksRemoved(tuple(block.hash for block in gone)))

    def _send(self, event: KvEvent) -> None:
        if self._tell is not None:
            self._tell((event,))

    def _touch(self, block: _Block) -> None:
        # Blocks before it are used with it: they learn it when it is evicted.
        self._time += 1
        block.last_use = self._time

    def _use(self, block: _Block) -> None:
        self._touch(block)
        block.uses += 1
        while block.uses == 1:  # and so are the blocks before it
            self._cached_in_use += 1
            block = block.parent
            block.uses += 1

    def _disuse(self, block: _Block) -> None:
        block.uses -= 1
        while not block.uses:
            self._cached_in_use -= 1
            if not block.children:
                self._queue(block)
            block = block.parent
            block.uses -= 1

    def _queue(self, block: _Block) -> None:
        if not block.queued:
            block.queued = True
            heapq.heappush(self._evictable, (block.last_use, block.serial, block))

    def _evict(self, count: int) -> list[int]:
        """Remove ``count`` blocks; there are so many that no request uses."""
        removed: list[int] = []
        while len(removed) < count:
            last_use, _, block = heapq.heappop(self._evictable)
            block.queued = False
            if block.uses or block.children:
                continue
            if block.last_use != last_use:
                self._queue(block)
                continue
            del self._blocks[block.hash]
            removed.append(block.hash)
            parent = block.parent
            parent.children -= 1
            parent.last_use = max(parent.last_use, last_use)
            if not (parent.children or parent.uses):
                self._queue(parent)
        return removed
