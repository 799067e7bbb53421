"""Settings of both ends of a transfer of embeddings."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

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

    REMOVED: ClassVar[Mapping[str, str]] = {
        "embedding_cached_bytes": "leave it out: embeddings are kept while the store has room",
        "embedding_lease_s": "leave it out: an embedding may wait for 300 s",
    }

    embedding_store_bytes: int = setting(
        1 << 30,
        help="memory for embeddings, cached and not yet fetched (1 GiB); shared memory, taken as "
        "it is first used",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingFetchSettings:
    """Settings of the worker that fetches embeddings."""

    REMOVED: ClassVar[Mapping[str, str]] = {
        "embedding_fetch_timeout_s": "leave it out: a fetch may take 10 s",
        **dict.fromkeys(
            ("encode_tls_ca_file", "encode_tls_cert_file", "encode_tls_key_file"),
            "name the folder of ca.crt, tls.crt and tls.key with --encode-tls-dir",
        ),
    }

    encode_tls_dir: Path | None = setting(
        None,
        help="folder with ca.crt, PEM CAs of the encode workers' certificates, and, for mTLS, "
        "tls.crt and tls.key, which this worker shows to them; turns TLS to them on",
    )
    encode_tls_name: str = setting(
        "", help="name in the encode workers' certificates, where their addresses are bare IPs"
    )
