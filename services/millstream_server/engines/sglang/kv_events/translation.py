"""SGLang's KV events as ours: unsigned hashes, and our own hashes for LoRA adapters' blocks.

SGLang's hashes of an adapter's blocks depend on a random id, so nobody else could compute them.
Ours are made anew from the token ids, and SGLang's are kept to know what a removal means.

An event is a map with its type under "type"; before 0.5.20 it was an array, which isn't read.
Imports msgspec, which comes with SGLang.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from millstream_server.kv_cache.events import (
    BlocksRemoved,
    BlocksStored,
    CacheCleared,
    KvEvent,
    Medium,
)
from millstream_server.kv_cache.hashing import Namespace, hash_of, next_digest

_NO_TOKENS = msgspec.Raw(b"\x90")


class Stored(msgspec.Struct, tag="BlockStored", gc=False):
    """Blocks that are cached now, each the child of the one before."""

    block_hashes: list[int]
    """Signed."""
    parent_block_hash: int | None = None
    token_ids: msgspec.Raw = _NO_TOKENS
    """Of all blocks; read only where they are needed."""
    medium: str | None = None
    cache_salt: str | None = None
    lora_name: str | None = None


class Removed(msgspec.Struct, tag="BlockRemoved", gc=False):
    """Blocks that are no longer cached in a medium."""

    block_hashes: list[int]
    medium: str | None = None


class Cleared(msgspec.Struct, tag="AllBlocksCleared", gc=False):
    """Nothing is cached any more."""


class _Batch(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[Stored | Removed | Cleared]


_BATCH = msgspec.msgpack.Decoder(_Batch)
_TOKENS = msgspec.msgpack.Decoder(list[int])


class UnreadableBatchError(Exception):
    """A batch isn't what SGLang sends."""


_MEDIA = {
    None: Medium.DEVICE,
    "GPU": Medium.DEVICE,
    "CPU_PINNED": Medium.HOST,
    "CPU": Medium.HOST,
    "DISK": Medium.DISK,
    "EXTERNAL": Medium.EXTERNAL,
}
_TOKEN_MASK = (1 << 32) - 1
_HASH_MASK = (1 << 64) - 1


@dataclass(slots=True)
class _AdapterBlock:
    """A block of a LoRA adapter."""

    adapter: str
    digest: bytes
    media: set[Medium] = field(default_factory=set)


class Translation:
    """Translates one rank's events, in order."""

    def __init__(self) -> None:
        self._adapter_blocks: dict[int, _AdapterBlock] = {}
        """By SGLang's hash."""
        self._holders: Counter[tuple[int, Medium]] = Counter()
        """How many of SGLang's blocks have our hash: several, when a name was loaded anew."""

    def batch(self, payload: bytes) -> list[KvEvent]:
        """Translate a batch.

        Raises:
            UnreadableBatchError: it isn't what SGLang sends.
        """
        try:
            events = _BATCH.decode(payload).events
        except msgspec.DecodeError as error:
            raise UnreadableBatchError(str(error)) from error
        found: list[KvEvent] = []
        for event in events:
            if isinstance(event, Stored):
                found += self._stored(event)
            elif isinstance(event, Removed):
                found += self._removed(event)
            else:
                found.append(self.cleared())
        return found

    def cleared(self) -> CacheCleared:
        self._adapter_blocks.clear()
        self._holders.clear()
        return CacheCleared()

    def without(self, adapter: str) -> list[KvEvent]:
        """Forget an unloaded adapter's blocks; return that they are gone.

        SGLang has them until they are evicted, but no request finds them again, even if the name
        is loaded anew.
        """
        gone: dict[Medium, list[int]] = {}
        for theirs, block in list(self._adapter_blocks.items()):
            if block.adapter == adapter:
                for medium in list(block.media):
                    gone.setdefault(medium, []).extend(self._adapter_removed(theirs, medium))
        return [BlocksRemoved(hashes, medium) for medium, hashes in gone.items() if hashes]

    def _stored(self, event: Stored) -> list[KvEvent]:
        medium = _MEDIA.get(event.medium, Medium.EXTERNAL)
        if event.lora_name:
            return self._adapter_stored(event, event.lora_name, medium)
        parent = event.parent_block_hash
        hashes = _unsigned(event.block_hashes)
        return [BlocksStored(hashes, None if parent is None else parent & _HASH_MASK, medium)]

    def _adapter_stored(self, event: Stored, adapter: str, medium: Medium) -> list[KvEvent]:
        parent = None
        if event.parent_block_hash is None:
            digest = Namespace(adapter, event.cache_salt or "").digest()
        elif (known := self._adapter_blocks.get(event.parent_block_hash)) is not None:
            digest = known.digest
            parent = hash_of(digest)
        else:
            return []  # its parent was told before a gap, and is lost
        tokens = [token & _TOKEN_MASK for token in _TOKENS.decode(event.token_ids)]
        size = len(tokens) // len(event.block_hashes) if event.block_hashes else 0
        hashes = []
        for index, theirs in enumerate(event.block_hashes):
            digest = next_digest(digest, tokens[index * size : (index + 1) * size])
            hashes.append(hash_of(digest))
            block = self._adapter_blocks.setdefault(theirs, _AdapterBlock(adapter, digest))
            if medium not in block.media:
                block.media.add(medium)
                self._holders[hashes[-1], medium] += 1
        return [BlocksStored(hashes, parent, medium, adapter)] if hashes else []

    def _removed(self, event: Removed) -> list[KvEvent]:
        medium = _MEDIA.get(event.medium, Medium.EXTERNAL)
        if not self._adapter_blocks:
            return [BlocksRemoved(_unsigned(event.block_hashes), medium)]
        plain = [each for each in event.block_hashes if each not in self._adapter_blocks]
        hashes = _unsigned(plain)
        for theirs in event.block_hashes:
            hashes += self._adapter_removed(theirs, medium)
        return [BlocksRemoved(hashes, medium)] if hashes else []

    def _adapter_removed(self, theirs: int, medium: Medium) -> Sequence[int]:
        """Return our hash of an adapter's block, unless another block has it, too."""
        block = self._adapter_blocks.get(theirs)
        if block is None or medium not in block.media:
            return ()
        block.media.remove(medium)
        if not block.media:
            del self._adapter_blocks[theirs]
        ours = hash_of(block.digest)
        self._holders[ours, medium] -= 1
        if self._holders[ours, medium]:
            return ()
        del self._holders[ours, medium]
        return (ours,)


def _unsigned(hashes: Sequence[int]) -> list[int]:
    """Read signed 64-bit numbers as unsigned ones."""
    return array("Q", array("q", hashes).tobytes()).tolist()
