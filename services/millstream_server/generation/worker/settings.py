"""Settings of a worker process that generates text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Self

from millstream_server.encode.transfer.settings import (
    EmbeddingFetchSettings,
    EmbeddingTransferSettings,
)
from millstream_server.engines.adapter import TextEngineSettings
from millstream_server.engines.registry import GENERATORS, Engines, GeneratorName
from millstream_server.generation.generator import GeneratorEngine
from millstream_server.runtime.settings import group, setting
from millstream_server.worker.control.plan import ControlSettings
from millstream_server.worker.host_settings import ModelSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings(ModelSettings):
    """Read by `python -m millstream_server.prefill` and `python -m millstream_server.decode`."""

    ENGINES: ClassVar[Engines[GeneratorEngine]] = GENERATORS

    engine: GeneratorName = setting("sglang", help=f"one of {', '.join(GENERATORS.names)}")
    common: TextEngineSettings = group(TextEngineSettings)
    own: Any = group(GENERATORS.own_settings)
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
        return self.ENGINES.checked(self)
