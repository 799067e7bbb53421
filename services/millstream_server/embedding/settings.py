"""Settings of an embedding worker."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from millstream_server.engines.sglang.vectors.settings import SglangEmbedderSettings
from millstream_server.engines.simulated.vectors import SimulatedEmbedderSettings
from millstream_server.runtime.settings import group, setting
from millstream_server.worker.host_settings import HostSettings
from millstream_server.worker.settings import EngineKind
from millstream_server.worker.vectors.settings import VectorSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingSettings(HostSettings):
    """Read by `python -m millstream_server.embedding`."""

    model_path: Path | None = setting(
        None, help="model directory (weights and config); not needed by the simulated engine"
    )
    model_name: str = setting(
        "", help="name the model is served under; empty: the directory's name"
    )
    engine: EngineKind = setting(EngineKind.SGLANG, help="sglang or simulated")
    vectors: VectorSettings = group(VectorSettings)
    sglang: SglangEmbedderSettings = group(SglangEmbedderSettings)
    simulated: SimulatedEmbedderSettings = group(SimulatedEmbedderSettings)
