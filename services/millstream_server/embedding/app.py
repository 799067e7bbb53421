"""An embedding worker's process: its settings, and what it serves."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from millstream_server.engines.base import Role
from millstream_server.engines.sglang.arguments import refuse_arguments
from millstream_server.engines.sglang.vectors.settings import (
    SglangEmbedderSettings,
    make_embedder,
    make_follower,
)
from millstream_server.engines.simulated.vectors import (
    SimulatedEmbedder,
    SimulatedEmbedderSettings,
    embedder_config,
)
from millstream_server.runtime.settings import group, setting
from millstream_server.vectors.embedder import Embedder
from millstream_server.worker import app, follower
from millstream_server.worker.host_settings import ModelSettings
from millstream_server.worker.settings import EngineKind
from millstream_server.worker.vectors.servicer import SERVICE, VectorSettings, make_plan


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingSettings(ModelSettings):
    """Read by `python -m millstream_server.embedding`."""

    engine: EngineKind = setting(EngineKind.SGLANG, help="sglang or simulated")
    vectors: VectorSettings = group(VectorSettings)
    sglang: SglangEmbedderSettings = group(SglangEmbedderSettings)
    simulated: SimulatedEmbedderSettings = group(SimulatedEmbedderSettings)

    def checked(self) -> Self:
        """Return the settings with the engine's own arguments read; called once, by `load`.

        Raises:
            SettingsError: one is unknown, wrong, or managed by us, or the engine takes none.
        """
        if self.engine is EngineKind.SIMULATED:
            refuse_arguments(self.sglang.engine_args, "simulated")
            self.sglang.topology.refuse("simulated")
            return self
        return replace(self, sglang=self.sglang.checked())


async def run(settings: EmbeddingSettings) -> int:
    """Run an embedding worker; return the process's exit code.

    Raises:
        SettingsError: settings contradict each other.
    """
    if settings.sglang.topology.follows:
        part = make_follower(settings.sglang, settings.model_path, settings.served_name)
        return await follower.run(settings, part, Role.EMBEDDING, SERVICE)
    plan = make_plan(_engine(settings), settings.served_name, settings.vectors)
    return await app.run(settings, plan)


def _engine(settings: EmbeddingSettings) -> Embedder:
    if settings.engine is EngineKind.SIMULATED:
        return SimulatedEmbedder(embedder_config(settings.simulated))
    return make_embedder(
        settings.sglang,
        settings.model_path,
        settings.served_name,
        metrics=bool(settings.metrics_listen),
    )
