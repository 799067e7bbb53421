"""Blocks of an engine's KV events with hashes of our own, which a router computes from token ids.

An engine's hashes may be made of what nobody else knows: then they are only keys here, which say
what a removal means.

Imports msgspec, which comes with engines.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar

import msgspec

from millstream_server.kv_cache.events import (
    BlocksRemoved,
    BlocksStored,
    CacheCleared,
    KvEvent,
    Medium,
)
from millstream_server.kv_cache.hashing import Namespace, hash_of, next_digest

KeyT = TypeVar("KeyT", bound=int | bytes)
EventT = TypeVar("EventT")


class UnreadableBatchError(Exception):
    """A batch isn't what the engine sends."""


class Cleared(msgspec.Struct, tag="AllBlocksCleared", gc=False):
    """Nothing is cached any more."""


class Batch(msgspec.Struct, Generic[EventT], array_like=True, gc=False):
    """What an engine sends at once."""

    ts: float
    events: list[EventT]


@dataclass(slots=True)
class _Block:
    digest: bytes
    adapter: str
    media: set[Medium] = field(default_factory=set)


class BlockTranslation(ABC, Generic[KeyT]):
    """Translates one rank's batches, in order; knows its blocks with hashes of our own."""

    decoder: ClassVar[msgspec.msgpack.Decoder[Any]]
    """Of a `Batch` of the engine's events, `Cleared` among them."""

    def __init__(self) -> None:
        self._blocks: dict[KeyT, _Block] = {}
        """By the engine's hash."""
        self._holders: Counter[tuple[int, Medium]] = Counter()
        """How many of the engine's blocks have our hash: several, if an adapter was loaded anew."""

    def batch(self, payload: bytes) -> list[KvEvent]:
        """Translate a batch.

        Raises:
            UnreadableBatchError: it isn't what the engine sends.
        """
        try:
            events = self.decoder.decode(payload).events
        except msgspec.DecodeError as error:
            raise UnreadableBatchError(str(error)) from error
        found: list[KvEvent] = []
        for event in events:
            found += [self.cleared()] if isinstance(event, Cleared) else self.translated(event)
        return found

    @abstractmethod
    def translated(self, event: Any) -> Sequence[KvEvent]:
        """Translate any other event."""

    def __bool__(self) -> bool:
        return bool(self._blocks)

    def __contains__(self, key: KeyT) -> bool:
        return key in self._blocks

    def stored(
        self,
        parent: KeyT | None,
        namespace: Namespace,
        blocks: Iterable[tuple[KeyT, Sequence[int]]],
        medium: Medium,
    ) -> list[KvEvent]:
        """Add blocks with their token ids, each the child of the one before.

        Without a parent they are the first of ``namespace``. Nothing is told of blocks whose parent
        isn't known: it wasn't told, or before a gap.
        """
        parent_hash: int | None = None
        if parent is None:
            digest = namespace.digest()
        elif (known := self._blocks.get(parent)) is not None:
            digest = known.digest
            parent_hash = hash_of(digest)
        else:
            return []
        hashes = []
        for key, token_ids in blocks:
            digest = next_digest(digest, token_ids)
            hashes.append(hash_of(digest))
            block = self._blocks.setdefault(key, _Block(digest, namespace.adapter))
            if medium not in block.media:
                block.media.add(medium)
                self._holders[hashes[-1], medium] += 1
        return [BlocksStored(hashes, parent_hash, medium, namespace.adapter)] if hashes else []

    def removed(self, keys: Iterable[KeyT], medium: Medium) -> list[int]:
        """Take blocks away; return our hashes that no other block has."""
        hashes = []
        for key in keys:
            block = self._blocks.get(key)
            if block is None or medium not in block.media:
                continue
            block.media.remove(medium)
            if not block.media:
                del self._blocks[key]
            ours = hash_of(block.digest)
            self._holders[ours, medium] -= 1
            if not self._holders[ours, medium]:
                del self._holders[ours, medium]
                hashes.append(ours)
        return hashes

    def cleared(self) -> CacheCleared:
        """Forget all blocks."""
        self._blocks.clear()
        self._holders.clear()
        return CacheCleared()

    def without(self, adapter: str) -> list[KvEvent]:
        """Forget an unloaded adapter's blocks; return that they are gone.

        The engine has them until they are evicted, but no request finds them again, even if the
        name is loaded anew.
        """
        theirs = [key for key, block in self._blocks.items() if block.adapter == adapter]
        gone = [(self.removed(theirs, medium), medium) for medium in Medium]
        return [BlocksRemoved(hashes, medium) for hashes, medium in gone if hashes]
