"""Settings of both ends of a transfer of embeddings."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from pathlib import Path

from millstream_server.runtime.settings import setting


class Transfer(enum.Enum):
    """Which ways an end offers; both ends must offer a way for it to be taken. Inline always is."""

    AUTO = "auto"
    INLINE = "inline"
    SHARED_MEMORY = "shared_memory"
    NIXL = "nixl"


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingTransferSettings:
    """Settings that both ends have."""

    embedding_transfer: Transfer = setting(
        Transfer.AUTO,
        help="how embeddings move between workers: inline (in gRPC messages), shared_memory (same "
        "machine), nixl (RDMA), or auto: shared_memory, else nixl, else inline",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingStoreSettings:
    """Settings of the worker that makes embeddings."""

    embedding_store_bytes: int = setting(
        1 << 30,
        help="memory for embeddings, cached and not yet fetched (1 GiB); shared memory, taken as "
        "it is first used",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingFetchSettings:
    """Settings of the worker that fetches embeddings."""

    encode_tls_dir: Path | None = setting(
        None,
        help="folder with ca.crt, PEM CAs of the encode workers' certificates, and, for mTLS, "
        "tls.crt and tls.key, which this worker shows to them; turns TLS to them on",
    )
    encode_tls_name: str = setting(
        "", help="name in the encode workers' certificates, where their addresses are bare IPs"
    )
