"""An embedding worker's process."""

from __future__ import annotations

from millstream_server.embedding.settings import EmbeddingSettings
from millstream_server.engines.base import Role
from millstream_server.engines.registry import EMBEDDERS
from millstream_server.worker import app, follower
from millstream_server.worker.vectors.service import make_plan
from millstream_server.worker.vectors.servicer import SERVICE


async def run(settings: EmbeddingSettings) -> int:
    """Run an embedding worker; return the process's exit code.

    Raises:
        SettingsError: settings contradict each other.
    """
    if (part := EMBEDDERS.follower(settings, Role.EMBEDDING)) is not None:
        return await follower.run(settings, part, Role.EMBEDDING, SERVICE)
    engine = EMBEDDERS.make(settings, Role.EMBEDDING)
    return await app.run(settings, make_plan(engine, settings.served_name, settings.vectors))
