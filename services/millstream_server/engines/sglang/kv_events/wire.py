"""SGLang's KV events as they travel: a msgpack array of a time and events.

Since 0.5.20 an event is a map with its type under "type"; before it was an array that begins with
its type. Both are read. Imports msgspec, which comes with SGLang.
"""

from __future__ import annotations

from typing import Any

import msgspec

_NO_TOKENS = msgspec.Raw(b"\x90")


class Stored(msgspec.Struct, tag="BlockStored", gc=False):
    """Blocks that are cached now, each the child of the one before."""

    block_hashes: list[int]
    """Signed."""
    parent_block_hash: int | None = None
    token_ids: msgspec.Raw = _NO_TOKENS
    """Of all blocks; read only where they are needed."""
    block_size: int = 0
    lora_id: Any = None
    medium: str | None = None
    cache_salt: str | None = None
    session_id: str | None = None
    lora_name: str | None = None

    def tokens(self) -> list[int]:
        """Read the token ids."""
        return _TOKENS.decode(self.token_ids)


class Removed(msgspec.Struct, tag="BlockRemoved", gc=False):
    """Blocks that are no longer cached in a medium."""

    block_hashes: list[int]
    medium: str | None = None


class Cleared(msgspec.Struct, tag="AllBlocksCleared", gc=False):
    """Nothing is cached any more."""


class _StoredArray(Stored, tag="BlockStored", array_like=True, gc=False):
    pass


class _RemovedArray(Removed, tag="BlockRemoved", array_like=True, gc=False):
    pass


class _ClearedArray(Cleared, tag="AllBlocksCleared", array_like=True, gc=False):
    pass


class _Maps(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[Stored | Removed | Cleared]


class _Arrays(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[_StoredArray | _RemovedArray | _ClearedArray]


_MAPS = msgspec.msgpack.Decoder(_Maps)
_ARRAYS = msgspec.msgpack.Decoder(_Arrays)
_TOKENS = msgspec.msgpack.Decoder(list[int])


class UnreadableBatchError(Exception):
    """A batch isn't what SGLang sends."""


def read(payload: bytes) -> list[Stored | Removed | Cleared]:
    """Read a batch.

    Raises:
        UnreadableBatchError: it is none.
    """
    try:
        return _MAPS.decode(payload).events
    except msgspec.DecodeError:
        pass
    try:
        return list(_ARRAYS.decode(payload).events)
    except msgspec.DecodeError as error:
        raise UnreadableBatchError(str(error)) from error
