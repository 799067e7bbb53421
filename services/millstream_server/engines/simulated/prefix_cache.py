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

Every call takes time proportional to the blocks that change, mostly that of a dictionary's update;
finding a prefix takes the logarithm of its length. Blocks that are always used together make one
node of a tree, which is split where another request leaves it.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Callable, KeysView, Sequence
from dataclasses import dataclass

from millstream_server.kv_cache.events import BlocksRemoved, BlocksStored, CacheCleared, KvEvent

Tell = Callable[[Sequence[KvEvent]], None]


class _Node:
    """Cached blocks in a row. ``uses`` counts requests that end with it, and children in use."""

    __slots__ = (
        "adapter",
        "children",
        "hashes",
        "last_use",
        "parent",
        "queued",
        "serial",
        "start",
        "uses",
    )

    def __init__(self, hashes: list[int], start: int, parent: _Node | None, serial: int) -> None:
        self.hashes = hashes
        self.start = start
        """How many blocks are before it."""
        self.parent = parent or self
        self.serial = serial
        self.adapter = ""
        self.children = 0
        self.uses = 0
        self.last_use = serial
        self.queued = False
        """Whether it has an entry in the queue for eviction."""


class _Evictable:
    """The nodes that can be evicted, least recently used first."""

    def __init__(self) -> None:
        # By last use, with entries that are out of date: `pop` skips them, or puts them right.
        self._heap: list[tuple[int, int, _Node]] = []

    def add(self, node: _Node) -> None:
        if not node.queued:
            node.queued = True
            heapq.heappush(self._heap, (node.last_use, node.serial, node))

    def pop(self) -> _Node:
        while True:
            last_use, _, node = heapq.heappop(self._heap)
            node.queued = False
            if node.uses or node.children:
                continue
            if node.last_use == last_use:
                return node
            self.add(node)

    def remove_adapter(self, adapter: str) -> None:
        self._heap = [entry for entry in self._heap if entry[2].adapter != adapter]
        heapq.heapify(self._heap)


@dataclass(slots=True, eq=False)
class HeldBlocks:
    """The blocks of one running request."""

    cached: int
    """Blocks of its prompt that were cached when it came."""
    adapter: str
    last: _Node
    """The node that ends with the last of its blocks that is cached; the root if none is."""
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
        self._nodes: dict[int, _Node] = {}
        self._root = _Node([], 0, None, 0)
        self._root.uses = 1
        self._time = 0
        self._cached_in_use = 0
        self._private = 0
        self._evictable = _Evictable()

    @property
    def used_blocks(self) -> int:
        """Blocks in use by requests; a block that several share counts once."""
        return self._private + self._cached_in_use

    @property
    def hashes(self) -> KeysView[int]:
        return self._nodes.keys()

    def follow(self, tell: Tell) -> None:
        """Send the events of each change to ``tell`` from now on."""
        self._tell = tell

    def count_cached(self, hashes: Sequence[int]) -> int:
        """Return how many blocks from the first on are cached; nothing is changed."""
        nodes = self._nodes
        if not hashes or hashes[0] not in nodes:
            return 0
        if hashes[-1] in nodes:
            return len(hashes)
        return bisect_left(hashes, True, key=lambda hash_: hash_ not in nodes)  # noqa: FBT003

    def acquire(self, hashes: Sequence[int], blocks: int, adapter: str = "") -> HeldBlocks | None:
        """Take ``blocks`` blocks for a request, of which those of ``hashes`` may be cached.

        Others are evicted where necessary. None: there is no room while other requests run.
        """
        cached = self.count_cached(hashes)
        last = self._node_ending(hashes, cached)
        self._use(last)
        private = max(blocks - cached, 0)
        if self.used_blocks + private > self.total_blocks:
            self._disuse(last)
            return None
        short = self._private + private + len(self._nodes) - self.total_blocks
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
        known = self.count_cached(hashes)
        node = self._node_ending(hashes, known)
        if known < len(hashes):
            node = self._add(node, hashes[known:], held)
        self._use(node)
        self._disuse(held.last)
        self._private -= new
        held.private -= new
        held.last, held.depth = node, len(hashes)
        if known < len(hashes) and self._tell is not None:
            parent = hashes[known - 1] if known else None
            self._send(BlocksStored(tuple(hashes[known:]), parent, adapter=held.adapter))

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
        self._nodes.clear()
        self._evictable = _Evictable()
        self._send(CacheCleared())

    def forget_adapter(self, adapter: str) -> None:
        """Remove the cached blocks of an adapter, which no request uses."""
        gone = [hash_ for hash_, node in self._nodes.items() if node.adapter == adapter]
        if not gone:
            return
        for hash_ in gone:
            del self._nodes[hash_]
        self._evictable.remove_adapter(adapter)
        self._send(BlocksRemoved(tuple(gone)))

    def _node_ending(self, hashes: Sequence[int], count: int) -> _Node:
        """Return the node that ends with the first ``count`` blocks, which are cached."""
        if not count:
            return self._root
        node = self._nodes[hashes[count - 1]]
        if (size := count - node.start) < len(node.hashes):
            return self._split(node, size)
        return node

    def _split(self, node: _Node, size: int) -> _Node:
        """Move a node's first ``size`` blocks into a node before it, which is returned."""
        self._time += 1
        head = _Node(node.hashes[:size], node.start, node.parent, self._time)
        head.adapter = node.adapter
        head.children = 1
        head.uses = 1 if node.uses else 0
        head.last_use = node.last_use
        node.hashes = node.hashes[size:]
        node.start += size
        node.parent = head
        self._nodes.update(dict.fromkeys(head.hashes, head))
        return head

    def _add(self, parent: _Node, hashes: Sequence[int], held: HeldBlocks) -> _Node:
        """Add blocks after a node: to the request's own if nothing else depends on that."""
        if parent is held.last and parent.uses == 1 and not parent.children and parent.hashes:
            node = parent
            node.hashes += hashes
            self._cached_in_use += len(hashes)
        else:
            self._time += 1
            start = parent.start + len(parent.hashes)
            node = _Node(list(hashes), start, parent, self._time)
            node.adapter = held.adapter
            parent.children += 1
        self._nodes.update(dict.fromkeys(hashes, node))
        return node

    def _send(self, event: KvEvent) -> None:
        if self._tell is not None:
            self._tell((event,))

    def _touch(self, node: _Node) -> None:
        # Blocks before it are used with it: they learn it when it is evicted.
        self._time += 1
        node.last_use = self._time

    def _use(self, node: _Node) -> None:
        self._touch(node)
        node.uses += 1
        while node.uses == 1:  # and so are the blocks before it
            self._cached_in_use += len(node.hashes)
            node = node.parent
            node.uses += 1

    def _disuse(self, node: _Node) -> None:
        node.uses -= 1
        while not node.uses:
            self._cached_in_use -= len(node.hashes)
            if not node.children:
                self._evictable.add(node)
            node = node.parent
            node.uses -= 1

    def _evict(self, count: int) -> list[int]:
        """Remove ``count`` blocks; there are so many that no request uses."""
        removed: list[int] = []
        while (left := count - len(removed)) > 0:
            node = self._evictable.pop()
            removed += node.hashes[: -left - 1 : -1]  # the last ones, from the end
            del node.hashes[-left:]
            if node.hashes:
                self._evictable.add(node)
                break
            parent = node.parent
            parent.children -= 1
            parent.last_use = max(parent.last_use, node.last_use)
            if not (parent.children or parent.uses):
                self._evictable.add(parent)
        for hash_ in removed:
            del self._nodes[hash_]
        return removed
