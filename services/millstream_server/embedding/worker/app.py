"""An embedding worker's process: its settings, and what it serves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from millstream_server.control.engine import Role
from millstream_server.embedding.worker.servicer import SERVICE, VectorSettings, make_plan
from millstream_server.engines.adapter import VectorEngineSettings
from millstream_server.engines.registry import EMBEDDERS, EmbedderName
from millstream_server.runtime.settings import group, setting
from millstream_server.worker import app, follower
from millstream_server.worker.host_settings import ModelSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingSettings(ModelSettings):
    """Read by `python -m millstream_server.embedding`."""

    engine: EmbedderName = setting("sglang", help=f"one of {', '.join(EMBEDDERS.names)}")
    vectors: VectorSettings = group(VectorSettings)
    common: VectorEngineSettings = group(VectorEngineSettings)
    own: Any = group(EMBEDDERS.own_settings)

    def checked(self) -> Self:
        return EMBEDDERS.checked(self)


async def run(settings: EmbeddingSettings) -> int:
    """Run an embedding worker; return the process's exit code."""
    if (part := EMBEDDERS.follower(settings, Role.EMBEDDING)) is not None:
        return await follower.run(settings, part, Role.EMBEDDING, SERVICE)
    engine = EMBEDDERS.make(settings, Role.EMBEDDING)
    return await app.run(settings, make_plan(engine, settings.served_name, settings.vectors))
