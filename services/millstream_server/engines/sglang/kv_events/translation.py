"""SGLang's KV events as ours: unsigned hashes, and our own hashes for LoRA adapters' blocks.

SGLang's hashes of an adapter's blocks depend on a random id, so nobody else could compute them.
Ours are made anew from the token ids, and SGLang's are kept to know what a removal means.

An event is a map with its type under "type"; before 0.5.20 it was an array, which isn't read.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import msgspec

from millstream_server.engines.kv_translation import Batch, BlockTranslation, Cleared
from millstream_server.kv_cache.events import (
    BlocksRemoved,
    BlocksStored,
    KvEvent,
    Medium,
)
from millstream_server.kv_cache.hashing import Namespace

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


_TOKENS = msgspec.msgpack.Decoder(list[int])


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


class Translation(BlockTranslation[int]):
    """Translates one rank's events, in order. Only adapters' blocks have hashes of our own."""

    decoder = msgspec.msgpack.Decoder(Batch[Stored | Removed | Cleared])

    def translated(self, event: Stored | Removed) -> list[KvEvent]:
        return self._stored(event) if isinstance(event, Stored) else self._removed(event)

    def _stored(self, event: Stored) -> list[KvEvent]:
        medium = _MEDIA.get(event.medium, Medium.EXTERNAL)
        if event.lora_name:
            return self._adapter_stored(event, event.lora_name, medium)
        parent = event.parent_block_hash
        hashes = _unsigned(event.block_hashes)
        return [BlocksStored(hashes, None if parent is None else parent & _HASH_MASK, medium)]

    def _adapter_stored(self, event: Stored, adapter: str, medium: Medium) -> list[KvEvent]:
        tokens = [token & _TOKEN_MASK for token in _TOKENS.decode(event.token_ids)]
        size = len(tokens) // len(event.block_hashes) if event.block_hashes else 0
        blocks = (
            (theirs, tokens[index * size : (index + 1) * size])
            for index, theirs in enumerate(event.block_hashes)
        )
        namespace = Namespace(adapter, event.cache_salt or "")
        return self.stored(event.parent_block_hash, namespace, blocks, medium)

    def _removed(self, event: Removed) -> list[KvEvent]:
        medium = _MEDIA.get(event.medium, Medium.EXTERNAL)
        if not self:
            return [BlocksRemoved(_unsigned(event.block_hashes), medium)]
        plain = [each for each in event.block_hashes if each not in self]
        hashes = _unsigned(plain) + self.removed(event.block_hashes, medium)
        return [BlocksRemoved(hashes, medium)] if hashes else []


def _unsigned(hashes: Sequence[int]) -> list[int]:
    """Read signed 64-bit numbers as unsigned ones."""
    return array("Q", array("q", hashes).tobytes()).tolist()
