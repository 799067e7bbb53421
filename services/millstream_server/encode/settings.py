"""Settings of an encode worker."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from millstream_server.engines.adapter import EncoderSettings
from millstream_server.engines.registry import AUTO, ENCODERS, EncoderName
from millstream_server.runtime.settings import group, setting
from millstream_server.transfer.embeddings.settings import EmbeddingTransferSettings
from millstream_server.worker.encoding.settings import EncodingSettings
from millstream_server.worker.host_settings import ModelSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodeSettings(ModelSettings):
    """Read by `python -m millstream_server.encode`."""

    REMOVED: ClassVar[Mapping[str, str]] = {"tower": "use --engine, with the same values"}

    engine: EncoderName = setting(
        AUTO,
        help=f"what encodes: one of {', '.join(ENCODERS.names)}, or auto: the first of them that "
        "has the model's family, such as sglang for Qwen2.5-VL and Qwen3-VL, and transformers",
    )
    model_path: Path | None = setting(
        None, help="model directory (weights and config); not needed by the simulated engine"
    )
    ticket_key: str = setting(
        "", help="hex key, 32 bytes or more, that signs tickets for embeddings", secret=True
    )
    common: EncoderSettings = group(EncoderSettings)
    own: Any = group(ENCODERS.own_settings)
    encoding: EncodingSettings = group(EncodingSettings)
    transfer: EmbeddingTransferSettings = group(EmbeddingTransferSettings)
