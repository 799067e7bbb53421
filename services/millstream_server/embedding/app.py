"""An embedding worker's process."""

from __future__ import annotations

from millstream_server.embedding.settings import EmbeddingSettings
from millstream_server.engines.base import Role
from millstream_server.engines.sglang.vectors.settings import make_embedder, make_follower
from millstream_server.engines.simulated.vectors import (
    SimulatedEmbedder,
    SimulatedEmbedderSettings,
    embedder_config,
)
from millstream_server.vectors.embedder import Embedder
from millstream_server.worker import app, follower
from millstream_server.worker.settings import EngineKind
from millstream_server.worker.vectors.service import make_plan
from millstream_server.worker.vectors.servicer import SERVICE


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
        own = SimulatedEmbedderSettings(**settings.sglang.engine_args.values)
        return SimulatedEmbedder(embedder_config(own))
    return make_embedder(
        settings.sglang,
        settings.model_path,
        settings.served_name,
        metrics=bool(settings.metrics_listen),
    )
