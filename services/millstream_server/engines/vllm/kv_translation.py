"""vLLM's KV events as ours: hashes that a router can compute from token ids alone.

vLLM hashes CBOR of its own making: its hashes are only keys here. An event has the token ids of
its blocks, and ours are made from those. What stands for images and videos is part of a block
and not of them; a router doesn't know it, so such blocks and those after them aren't told.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import msgspec

from millstream_server.engines.kv_translation import Batch, BlockTranslation, Cleared
from millstream_server.engines.vllm.kv_feed import LOAD_MARK
from millstream_server.kv_cache.events import BlocksRemoved, KvEvent, Medium
from millstream_server.kv_cache.hashing import Namespace

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


_Key = int | bytes


class Translation(BlockTranslation[_Key]):
    """Translates one rank's events, in order."""

    decoder = msgspec.msgpack.Decoder(Batch[Stored | Removed | Cleared])

    def translated(self, event: Stored | Removed) -> list[KvEvent]:
        if event.group_idx:
            return []  # of another kind of attention, beside the whole prefix's
        if isinstance(event, Stored):
            return self._stored(event)
        medium = _medium(event.medium)
        hashes = self.removed(event.block_hashes, medium)
        return [BlocksRemoved(hashes, medium)] if hashes else []

    def _stored(self, event: Stored) -> list[KvEvent]:
        keys: Sequence[list[Any] | None] = event.extra_keys or [None] * len(event.block_hashes)
        salt = _salt(keys[0], event.lora_name) if keys and event.parent_block_hash is None else ""
        namespace = Namespace(_adapter(event.lora_name), salt)
        size = event.block_size
        told = itertools.takewhile(
            lambda pair: not _has_media(pair[1]), zip(event.block_hashes, keys, strict=False)
        )
        blocks = (
            (theirs, event.token_ids[index * size : (index + 1) * size])
            for index, (theirs, _) in enumerate(told)
        )
        medium = _medium(event.medium)
        return self.stored(event.parent_block_hash, namespace, blocks, medium)


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
