"""Hashes of KV blocks, as BlockHashing.SHA256_CHAIN in kv_events.proto defines them.

Without an adapter they are those of SGLang 0.5.23 (its radix cache), so that a router can compute
what a worker's events name.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256

_SALT = b"sglang-cache-salt-v1\0"
_ADAPTER = b"millstream-adapter-v1\0"
_HASH = struct.Struct(">Q")
_HASHES = struct.Struct(">Q24x")
"""The hash, and the rest of its digest."""


@dataclass(frozen=True, slots=True)
class Namespace:
    """What separates caches of the same tokens."""

    adapter: str = ""
    """Name of the LoRA adapter; empty: the base model."""
    salt: str = ""

    def digest(self) -> bytes:
        """Return what stands before the first block's tokens; empty without adapter and salt."""
        if self.adapter:
            text = self.adapter.encode() + b"\0" + self.salt.encode()
            return sha256(_ADAPTER + text).digest()
        return sha256(_SALT + self.salt.encode()).digest() if self.salt else b""


NO_NAMESPACE = Namespace()


def block_hashes(
    token_ids: Sequence[int], block_size: int, namespace: Namespace = NO_NAMESPACE
) -> list[int]:
    """Return the hash of each full block of a prompt, as unsigned 64-bit numbers.

    ``block_size`` is in tokens. A rest that fills no block has no hash.
    """
    return further_hashes(namespace.digest(), token_ids, block_size)[0]


def further_hashes(
    digest: bytes, token_ids: Sequence[int], block_size: int
) -> tuple[list[int], bytes]:
    """Return the hashes of the blocks after the one that has ``digest``, and the last digest.

    ``token_ids`` are those after that block. Before the first block stands `Namespace.digest`.
    """
    full = len(token_ids) // block_size * block_size
    packed = struct.pack(f"<{full}I", *token_ids[:full])
    size = 4 * block_size
    digests = []
    for at in range(0, len(packed), size):
        digest = sha256(digest + packed[at : at + size]).digest()
        digests.append(digest)
    return [hash_ for (hash_,) in _HASHES.iter_unpack(b"".join(digests))], digest


def next_digest(digest: bytes, token_ids: Sequence[int]) -> bytes:
    """Return the digest of a block after the one that has ``digest``; see `hash_of`."""
    return sha256(digest + struct.pack(f"<{len(token_ids)}I", *token_ids)).digest()


def hash_of(digest: bytes) -> int:
    """Return the hash of the block that has this digest."""
    return int(_HASH.unpack_from(digest)[0])
