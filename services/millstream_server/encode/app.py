"""An encode worker's process."""

from __future__ import annotations

from millstream_server.encode.settings import EncodeSettings
from millstream_server.encoding.encoder import MediaEncoder
from millstream_server.engines.simulated.encoder import SimulatedEncoder
from millstream_server.engines.simulated.settings import (
    SimulatedEncoderSettings,
    encoder_config,
)
from millstream_server.runtime.settings import SettingsError
from millstream_server.transfer.embeddings.ticket import EmbeddingTickets
from millstream_server.transfer.ticket import TicketKey
from millstream_server.worker import app
from millstream_server.worker.encoder_choice import TowerKind, make_encoder
from millstream_server.worker.encoding.service import Serving, make_plan


async def run(settings: EncodeSettings) -> int:
    """Run an encode worker; return the process's exit code.

    Raises:
        SettingsError: settings contradict each other.
    """
    serving = Serving(
        tickets=_tickets(settings.ticket_key),
        transfer=settings.transfer.embedding_transfer,
    )
    hosted = settings.encoding.hosted(_encoder(settings))
    return await app.run(settings, make_plan(hosted, settings.served_name, serving))


def _encoder(settings: EncodeSettings) -> MediaEncoder:
    if settings.encoder.tower is TowerKind.SIMULATED:
        config = encoder_config(
            SimulatedEncoderSettings(**settings.engine_args.values),
            settings.encoder.max_item_tokens,
            settings.model_path,
        )
        return SimulatedEncoder(config)
    if settings.model_path is None:
        raise SettingsError("--model-path is required, except with --tower simulated")
    return make_encoder(settings.encoder, settings.model_path)


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
