"""Settings of an encode worker."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Self

from millstream_server.engines.simulated.settings import (
    SimulatedEncoderSettings,
    gone,
    read_simulated,
)
from millstream_server.runtime.settings import EngineArguments, group, setting
from millstream_server.runtime.settings.arguments import refuse_arguments
from millstream_server.transfer.embeddings.settings import EmbeddingTransferSettings
from millstream_server.worker.encoder_choice import EncoderSettings, TowerKind
from millstream_server.worker.encoding.settings import EncodingSettings
from millstream_server.worker.host_settings import ModelSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodeSettings(ModelSettings):
    """Read by `python -m millstream_server.encode`."""

    REMOVED: ClassVar[Mapping[str, str]] = gone(SimulatedEncoderSettings)

    model_path: Path | None = setting(
        None, help="model directory (weights and config); not needed by the simulated tower"
    )
    ticket_key: str = setting(
        "", help="hex key, 32 bytes or more, that signs tickets for embeddings", secret=True
    )
    encoder: EncoderSettings = group(EncoderSettings)
    encoding: EncodingSettings = group(EncodingSettings)
    transfer: EmbeddingTransferSettings = group(EmbeddingTransferSettings)
    engine_args: EngineArguments = setting(
        EngineArguments(), help="the simulated tower's own arguments: behind --, not as a flag"
    )

    def checked(self) -> Self:
        """Return the settings; called once, by `load`.

        Raises:
            SettingsError: an argument of the tower is unknown or wrong, or it takes none.
        """
        if self.encoder.tower is not TowerKind.SIMULATED:
            refuse_arguments(self.engine_args, self.encoder.tower.value)
            return self
        read = read_simulated(SimulatedEncoderSettings, self.engine_args)
        return replace(self, engine_args=read)
