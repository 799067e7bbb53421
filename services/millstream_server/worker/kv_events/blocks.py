"""The blocks that one rank's prefix cache holds now."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from millstream_server.kv_cache.events import (
    BlocksRemoved,
    BlocksStored,
    CacheCleared,
    KvEvent,
    Medium,
)
from millstream_server.worker.kv_events.freezable import FreezableDict

_BITS = {medium: 1 << position for position, medium in enumerate(Medium)}

Kind = tuple[int, str]
"""A set of media, as bits, and an adapter."""
_PLAIN: Kind = (_BITS[Medium.DEVICE], "")


@functools.lru_cache(1024)
def _kind(media: int, adapter: str) -> Kind:
    """Return one and the same tuple for equal values, so that a block costs a reference."""
    return (media, adapter)


@functools.lru_cache(16)
def media_of(bits: int) -> frozenset[Medium]:
    """Return the media of a `Kind`."""
    return frozenset(medium for medium, bit in _BITS.items() if bits & bit)


@dataclass(frozen=True, slots=True)
class FrozenBlocks:
    """The set at one moment."""

    parents: Mapping[int, int | None]
    kinds: Mapping[int, Kind]

    def chains(self, max_hashes: int) -> Iterator[BlocksStored]:
        """Yield all blocks as chains of at most ``max_hashes``, once for each medium.

        A block comes after its parent if it was cached after it.
        """
        chain: list[int] = []
        before: int | None = None
        last, kind = None, _PLAIN
        kinds = self.kinds
        for block, parent in self.parents.items():
            its_kind = kinds.get(block, _PLAIN) if kinds else _PLAIN
            if chain and parent == last and its_kind == kind and len(chain) < max_hashes:
                chain.append(block)
            else:
                yield from _stored(chain, before, kind)
                chain, before, kind = [block], parent, its_kind
            last = block
        yield from _stored(chain, before, kind)


def _stored(chain: list[int], parent: int | None, kind: Kind) -> Iterator[BlocksStored]:
    if chain:
        bits, adapter = kind
        for medium in Medium:
            if bits & _BITS[medium]:
                yield BlocksStored(chain, parent, medium, adapter)


class CachedBlocks:
    """A set of blocks: each one's parent, media and adapter.

    A block costs 80 to 110 bytes (its hash and an entry in a dict, measured with a million of them;
    the parent is the number object that the parent's own entry has); one of an adapter, or not on
    the device alone, 60 more. Blocks that are stored twice or removed without being there change
    nothing.
    """

    def __init__(self) -> None:
        """Start empty."""
        self._parents: FreezableDict[int | None] = FreezableDict()
        self._kinds: FreezableDict[Kind] = FreezableDict()  # of blocks that aren't _PLAIN

    def __len__(self) -> int:
        """Return the number of blocks; one in several media counts once."""
        return len(self._parents)

    def apply(self, event: KvEvent) -> None:
        """Change the set."""
        match event:
            case BlocksStored():
                self._store(event)
            case BlocksRemoved():
                self._remove(event)
            case CacheCleared():
                self._parents.clear()
                self._kinds.clear()

    def media(self, block: int) -> frozenset[Medium]:
        """Return where a block is cached; empty: nowhere."""
        if block not in self._parents:
            return frozenset()
        return media_of(self._kinds.get(block, _PLAIN)[0])

    def freeze(self) -> FrozenBlocks:
        """Return the set at this moment, or at the moment when it was frozen; valid until `thaw`.

        Nothing is copied. Until `thaw` each block that changes costs an entry more.
        """
        return FrozenBlocks(self._parents.freeze(), self._kinds.freeze())

    @property
    def changes(self) -> int:
        """Number of blocks that changed since it was frozen."""
        return self._parents.changes + self._kinds.changes

    def thaw(self) -> None:
        """Give up what `freeze` returned."""
        self._parents.thaw()
        self._kinds.thaw()

    def _store(self, event: BlocksStored) -> None:
        parents, kinds = self._parents, self._kinds
        bit, adapter, parent = _BITS[event.medium], event.adapter, event.parent
        new = _kind(bit, adapter)
        for block in event.hashes:
            if block not in parents:
                parents.set(block, parent)
                if new != _PLAIN:
                    kinds.set(block, new)
            elif not (known := kinds.get(block, _PLAIN))[0] & bit:
                kinds.set(block, _kind(known[0] | bit, known[1]))
            parent = block

    def _remove(self, event: BlocksRemoved) -> None:
        parents, kinds = self._parents, self._kinds
        bit = _BITS[event.medium]
        for block in event.hashes:
            known = kinds.get(block, _PLAIN)
            if block not in parents or not known[0] & bit:
                continue
            left = _kind(known[0] & ~bit, known[1])
            if not left[0]:
                parents.discard(block)
                kinds.discard(block)
            elif left == _PLAIN:
                kinds.discard(block)
            else:
                kinds.set(block, left)
