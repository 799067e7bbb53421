"""Settings of an encode worker."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from millstream_server.engines.simulated.settings import SimulatedEncoderSettings
from millstream_server.runtime.settings import group, setting
from millstream_server.transfer.embeddings.settings import EmbeddingTransferSettings
from millstream_server.worker.encoding.settings import EncoderSettings, EncodingSettings
from millstream_server.worker.host_settings import ModelSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodeSettings(ModelSettings):
    """Read by `python -m millstream_server.encode`."""

    model_path: Path | None = setting(
        None, help="model directory (weights and config); not needed by the simulated tower"
    )
    ticket_key: str = setting(
        "", help="hex key, 32 bytes or more, that signs tickets for embeddings", secret=True
    )
    encoder: EncoderSettings = group(EncoderSettings)
    encoding: EncodingSettings = group(EncodingSettings)
    transfer: EmbeddingTransferSettings = group(EmbeddingTransferSettings)
    simulated: SimulatedEncoderSettings = group(SimulatedEncoderSettings)
