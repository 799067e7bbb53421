"""The blocks that one member's prefix cache holds, bounded."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence

from millstream_server.kv_cache.events import Medium

_BITS = {medium: 1 << number for number, medium in enumerate(Medium)}
_DEVICE = _BITS[Medium.DEVICE]


class Holdings:
    """Blocks by hash, each with its parent, in two generations.

    A block that is stored or used is young, and so are its ancestors. `forget` drops the others
    and starts a new generation. So what is dropped was not used for longest, and is never the
    parent of a block that stays: without its ancestors a block helps no prompt.
    """

    __slots__ = ("_media", "_old", "_young")

    def __init__(self) -> None:
        """Start empty."""
        self._young: dict[int, int | None] = {}
        self._old: dict[int, int | None] = {}
        self._media: dict[int, int] = {}
        """Where blocks are, as bits; those that are in `Medium.DEVICE` alone are not in here."""

    def __len__(self) -> int:
        """Return the number of blocks."""
        return len(self._young) + len(self._old)

    def __contains__(self, block: int) -> bool:
        """Return whether a block is held in any medium."""
        return block in self._young or block in self._old

    @property
    def young(self) -> int:
        """Number of blocks that were stored or used since the last `forget`."""
        return len(self._young)

    def hashes(self) -> set[int]:
        """Return all blocks."""
        return self._young.keys() | self._old.keys()

    def blocks(self) -> Iterator[int]:
        """Iterate over all blocks; nothing may change meanwhile."""
        return itertools.chain(self._young, self._old)

    def store(self, hashes: Sequence[int], parent: int | None, medium: Medium) -> None:
        """Add blocks, each the child of the one before; ``parent`` is that of the first."""
        young, old, media = self._young, self._old, self._media
        bit = _BITS[medium]
        self.use(parent)
        for block in hashes:
            if block in young or block in old:
                if block in old:
                    young[block] = old.pop(block)
                where = media.get(block, _DEVICE)
                if not where & bit:
                    media[block] = where | bit
            else:
                young[block] = parent
                if bit != _DEVICE:
                    media[block] = bit
            parent = block

    def remove(self, hashes: Sequence[int], medium: Medium) -> list[int]:
        """Remove blocks from a medium; return those that were held and are in no other one."""
        young, old, media = self._young, self._old, self._media
        bit = _BITS[medium]
        gone = []
        for block in hashes:
            where = media.pop(block, _DEVICE) & ~bit
            if block not in young and block not in old:
                continue
            if not where:
                gone.append(block)
                young.pop(block, None)
                old.pop(block, None)
            elif where != _DEVICE:
                media[block] = where
        return gone

    def use(self, block: int | None) -> None:
        """Make a block and its ancestors young."""
        young, old = self._young, self._old
        while block is not None and block in old:
            parent = young[block] = old.pop(block)
            block = parent

    def forget(self) -> Collection[int]:
        """Drop the blocks that are not young; return them. The young ones are then old."""
        dropped = self._old
        self._old, self._young = self._young, {}
        if self._media:
            for block in dropped:
                self._media.pop(block, None)
        return dropped
