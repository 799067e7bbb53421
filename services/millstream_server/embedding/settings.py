"""Settings of an embedding worker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from millstream_server.engines.adapter import VectorEngineSettings
from millstream_server.engines.registry import EMBEDDERS, EmbedderName
from millstream_server.runtime.settings import group, setting
from millstream_server.worker.host_settings import ModelSettings
from millstream_server.worker.vectors.settings import VectorSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingSettings(ModelSettings):
    """Read by `python -m millstream_server.embedding`."""

    engine: EmbedderName = setting("sglang", help=f"one of {', '.join(EMBEDDERS.names)}")
    vectors: VectorSettings = group(VectorSettings)
    common: VectorEngineSettings = group(VectorEngineSettings)
    own: Any = group(EMBEDDERS.own_settings)

    def checked(self) -> Self:
        """Return the settings with the engine's own arguments read; called once, by `load`.

        Raises:
            SettingsError: one is unknown, wrong, or managed by us, or the engine takes none.
        """
        return EMBEDDERS.checked(self)
