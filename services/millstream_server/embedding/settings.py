"""Settings of an embedding worker."""

from __future__ import annotations

from dataclasses import dataclass

from millstream_server.engines.sglang.vectors.settings import SglangEmbedderSettings
from millstream_server.engines.simulated.vectors import SimulatedEmbedderSettings
from millstream_server.runtime.settings import group, setting
from millstream_server.worker.host_settings import ModelSettings
from millstream_server.worker.settings import EngineKind
from millstream_server.worker.vectors.settings import VectorSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingSettings(ModelSettings):
    """Read by `python -m millstream_server.embedding`."""

    engine: EngineKind = setting(EngineKind.SGLANG, help="sglang or simulated")
    vectors: VectorSettings = group(VectorSettings)
    sglang: SglangEmbedderSettings = group(SglangEmbedderSettings)
    simulated: SimulatedEmbedderSettings = group(SimulatedEmbedderSettings)
