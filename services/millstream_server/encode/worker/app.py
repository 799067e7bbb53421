"""An encode worker's process: its settings, and what it serves."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from millstream_server.control.engine import Role
from millstream_server.encode.encoder import MediaEncoder
from millstream_server.encode.transfer.settings import EmbeddingTransferSettings
from millstream_server.encode.transfer.ticket import EmbeddingTickets
from millstream_server.encode.worker.core import EncodeOptions
from millstream_server.encode.worker.servicer import make_plan
from millstream_server.encode.worker.settings import EncodingSettings
from millstream_server.engines.adapter import EncoderSettings
from millstream_server.engines.registry import AUTO, ENCODERS, EncoderName, encoder_for
from millstream_server.generation.ticket import TicketKey
from millstream_server.runtime.settings import SettingsError, group, setting
from millstream_server.runtime.settings.arguments import refuse_arguments
from millstream_server.worker import app
from millstream_server.worker.host_settings import ModelSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodeSettings(ModelSettings):
    """Read by `python -m millstream_server.encode`."""

    engine: EncoderName = setting(
        AUTO,
        help=f"what encodes: one of {', '.join(ENCODERS.names)}, or auto: the first of them that "
        "has the model's family, such as sglang for Qwen2.5-VL and Qwen3-VL, and transformers",
    )
    model_path: Path | None = setting(
        None, help="model directory (weights and config); not needed by the simulated engine"
    )
    ticket_key: str = setting(
        "", help="hex key, 32 bytes or more, that signs tickets for embeddings", secret=True
    )
    common: EncoderSettings = group(EncoderSettings)
    own: Any = group(ENCODERS.own_settings)
    encoding: EncodingSettings = group(EncodingSettings)
    transfer: EmbeddingTransferSettings = group(EmbeddingTransferSettings)

    def checked(self) -> Self:
        if self.engine == AUTO:
            refuse_arguments(self.common.engine_args, AUTO)
            return self
        return ENCODERS.checked(self)


async def run(settings: EncodeSettings) -> int:
    """Run an encode worker; return the process's exit code."""
    options = EncodeOptions(
        tickets=_tickets(settings.ticket_key), transfer=settings.transfer.embedding_transfer
    )
    hosted = settings.encoding.hosted(_encoder(settings))
    return await app.run(settings, make_plan(hosted, settings.served_name, options))


def _encoder(settings: EncodeSettings) -> MediaEncoder:
    if settings.engine == AUTO:
        settings = replace(settings, engine=encoder_for(settings.model_path))
    return ENCODERS.make(settings, Role.ENCODE)


def _tickets(key: str) -> EmbeddingTickets:
    if not key:
        raise SettingsError(
            "MILLSTREAM_TICKET_KEY is required: the same key, 32 random bytes in hex, for the "
            "Processor and all workers (make one with `openssl rand -hex 32`)"
        )
    try:
        return EmbeddingTickets(TicketKey.from_hex(key))
    except ValueError as error:
        raise SettingsError(f"MILLSTREAM_TICKET_KEY: {error}") from error
