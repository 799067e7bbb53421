"""Settings of a worker process that generates text."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from millstream_server.engines.settings import CommonEngineSettings
from millstream_server.engines.sglang.settings import SglangSettings
from millstream_server.engines.simulated.settings import SimulatedSettings, gone, read_simulated
from millstream_server.runtime.settings import group, setting
from millstream_server.transfer.embeddings.settings import (
    EmbeddingFetchSettings,
    EmbeddingTransferSettings,
)
from millstream_server.worker.control.settings import ControlSettings
from millstream_server.worker.host_settings import ModelSettings


class EngineKind(enum.Enum):
    """Which engine the worker runs."""

    SGLANG = "sglang"
    SIMULATED = "simulated"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings(ModelSettings):
    """Read by `python -m millstream_server.prefill` and `python -m millstream_server.decode`."""

    REMOVED: ClassVar[Mapping[str, str]] = gone(SimulatedSettings) | {
        "kv_event_buffer": "leave it out: 262144 hashes of a rank are kept",
    }

    engine: EngineKind = setting(EngineKind.SGLANG, help="sglang or simulated")
    common: CommonEngineSettings = group(CommonEngineSettings)
    sglang: SglangSettings = group(SglangSettings)
    ticket_key: str = setting(
        "",
        help="hex key, 32 bytes or more, that signs tickets of hand-offs and embeddings",
        secret=True,
    )
    embedding: EmbeddingTransferSettings = group(EmbeddingTransferSettings)
    embedding_fetch: EmbeddingFetchSettings = group(EmbeddingFetchSettings)
    control: ControlSettings = group(ControlSettings)
    max_open_tokens: int = setting(
        0, help="most prompt tokens of open requests; 0: four times what the KV cache holds"
    )

    def checked(self) -> Self:
        """Return the settings with the engine's own arguments read; called once, by `load`.

        Raises:
            SettingsError: one is unknown, wrong, or managed by us, or the engine takes none.
        """
        if self.engine is EngineKind.SIMULATED:
            self.sglang.topology.refuse("simulated")
            read = read_simulated(SimulatedSettings, self.sglang.engine_args)
            return replace(self, sglang=replace(self.sglang, engine_args=read))
        return replace(self, sglang=self.sglang.checked())
