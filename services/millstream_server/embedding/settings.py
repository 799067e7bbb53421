"""Settings of an embedding worker."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from millstream_server.engines.sglang.vectors.settings import SglangEmbedderSettings
from millstream_server.engines.simulated.settings import gone, read_simulated
from millstream_server.engines.simulated.vectors import SimulatedEmbedderSettings
from millstream_server.runtime.settings import group, setting
from millstream_server.worker.host_settings import ModelSettings
from millstream_server.worker.settings import EngineKind
from millstream_server.worker.vectors.settings import VectorSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingSettings(ModelSettings):
    """Read by `python -m millstream_server.embedding`."""

    REMOVED: ClassVar[Mapping[str, str]] = gone(SimulatedEmbedderSettings)

    engine: EngineKind = setting(EngineKind.SGLANG, help="sglang or simulated")
    vectors: VectorSettings = group(VectorSettings)
    sglang: SglangEmbedderSettings = group(SglangEmbedderSettings)

    def checked(self) -> Self:
        """Return the settings with the engine's own arguments read; called once, by `load`.

        Raises:
            SettingsError: one is unknown, wrong, or managed by us, or the engine takes none.
        """
        if self.engine is EngineKind.SIMULATED:
            self.sglang.topology.refuse("simulated")
            read = read_simulated(SimulatedEmbedderSettings, self.sglang.engine_args)
            return replace(self, sglang=replace(self.sglang, engine_args=read))
        return replace(self, sglang=self.sglang.checked())
