"""vLLM's KV events as ours: hashes that a router can compute from token ids alone.

vLLM hashes CBOR of its own making: its hashes are only keys here. An event has the token ids of
its blocks, and ours are made from those. What stands for images and videos is part of a block
and not of them; a router doesn't know it, so such blocks and those after them aren't told.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from millstream_server.engines.sglang.kv_events.translation import UnreadableBatchError
from millstream_server.engines.vllm.kv_feed import LOAD_MARK
from millstream_server.kv_cache.events import (
    BlocksRemoved,
    BlocksStored,
    CacheCleared,
    KvEvent,
    Medium,
)
from millstream_server.kv_cache.hashing import Namespace, hash_of, next_digest

_MEDIA = {
    None: Medium.DEVICE,
    "GPU": Medium.DEVICE,
    "CPU": Medium.HOST,
    "STORAGE": Medium.DISK,
}


class Stored(msgspec.Struct, tag="BlockStored", gc=False):
    """Blocks that are cached now, each the child of the one before."""

    block_hashes: list[int | bytes]
    token_ids: list[int]
    block_size: int
    parent_block_hash: int | bytes | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None


class Removed(msgspec.Struct, tag="BlockRemoved", gc=False):
    """Blocks that are no longer cached in a medium."""

    block_hashes: list[int | bytes]
    medium: str | None = None
    group_idx: int | None = None


class Cleared(msgspec.Struct, tag="AllBlocksCleared", gc=False):
    """Nothing is cached any more."""


class _Batch(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[Stored | Removed | Cleared]


_BATCH = msgspec.msgpack.Decoder(_Batch)
_Key = int | bytes


@dataclass(slots=True)
class _Block:
    digest: bytes
    adapter: str
    media: set[Medium] = field(default_factory=set)


class Translation:
    """Translates one rank's events, in order."""

    def __init__(self) -> None:
        """Start with an empty cache."""
        self._blocks: dict[_Key, _Block] = {}
        """By vLLM's hash."""
        self._holders: Counter[tuple[int, Medium]] = Counter()
        """How many of vLLM's blocks have our hash: several, when an adapter was loaded anew."""

    def batch(self, payload: bytes) -> list[KvEvent]:
        """Translate a batch.

        Raises:
            UnreadableBatchError: it isn't what vLLM sends.
        """
        try:
            events = _BATCH.decode(payload).events
        except msgspec.DecodeError as error:
            raise UnreadableBatchError(str(error)) from error
        found: list[KvEvent] = []
        for event in events:
            if isinstance(event, Cleared):
                found.append(self.cleared())
            elif event.group_idx:
                continue  # of another kind of attention, beside the whole prefix's
            elif isinstance(event, Stored):
                found += self._stored(event)
            else:
                found += self._removed(event.block_hashes, _medium(event.medium))
        return found

    def cleared(self) -> CacheCleared:
        """Forget all blocks."""
        self._blocks.clear()
        self._holders.clear()
        return CacheCleared()

    def without(self, adapter: str) -> list[KvEvent]:
        """Forget an unloaded adapter's blocks; return that they are gone.

        vLLM has them until they are evicted, but no request finds them again.
        """
        gone: list[KvEvent] = []
        theirs = [key for key, block in self._blocks.items() if block.adapter == adapter]
        for medium in Medium:
            gone += self._removed(theirs, medium)
        return gone

    def _stored(self, event: Stored) -> list[KvEvent]:
        medium, adapter = _medium(event.medium), _adapter(event.lora_name)
        keys: Sequence[list[Any] | None] = event.extra_keys or [None] * len(event.block_hashes)
        parent: int | None = None
        if event.parent_block_hash is None:
            digest = Namespace(adapter, _salt(keys[0], event.lora_name) if keys else "").digest()
        elif (known := self._blocks.get(event.parent_block_hash)) is not None:
            digest = known.digest
            parent = hash_of(digest)
        else:
            return []  # it wasn't told, or before a gap
        hashes = []
        size = event.block_size
        for index, (theirs, extra) in enumerate(zip(event.block_hashes, keys, strict=False)):
            if _has_media(extra):
                break
            digest = next_digest(digest, event.token_ids[index * size : (index + 1) * size])
            hashes.append(hash_of(digest))
            block = self._blocks.setdefault(theirs, _Block(digest, adapter))
            if medium not in block.media:
                block.media.add(medium)
                self._holders[hashes[-1], medium] += 1
        return [BlocksStored(hashes, parent, medium, adapter)] if hashes else []

    def _removed(self, theirs: Sequence[_Key], medium: Medium) -> list[KvEvent]:
        hashes = []
        for key in theirs:
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
        return [BlocksRemoved(hashes, medium)] if hashes else []


def _medium(name: str | None) -> Medium:
    return _MEDIA.get(name, Medium.EXTERNAL)


def _adapter(lora_name: str | None) -> str:
    return lora_name.rpartition(LOAD_MARK)[0] if lora_name else ""


def _salt(keys: list[Any] | None, lora_name: str | None) -> str:
    """Return the salt among a first block's keys: the text that isn't the adapter's name."""
    texts = [key for key in keys or () if isinstance(key, str)]
    if lora_name and texts[:1] == [lora_name]:
        texts = texts[1:]
    return texts[0] if texts else ""


def _has_media(keys: list[Any] | None) -> bool:
    return any(isinstance(key, (list, tuple)) for key in keys or ())
