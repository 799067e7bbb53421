"""An encode worker's process."""

from __future__ import annotations

from dataclasses import replace

from millstream_server.encode.settings import EncodeSettings
from millstream_server.encoding.encoder import MediaEncoder
from millstream_server.engines.base import Role
from millstream_server.engines.registry import AUTO, ENCODERS, encoder_for
from millstream_server.runtime.settings import SettingsError
from millstream_server.transfer.embeddings.ticket import EmbeddingTickets
from millstream_server.transfer.ticket import TicketKey
from millstream_server.worker import app
from millstream_server.worker.encoding.service import Serving, make_plan


async def run(settings: EncodeSettings) -> int:
    """Run an encode worker; return the process's exit code.

    Raises:
        SettingsError: settings contradict each other.
    """
    serving = Serving(
        options=settings.encoding.options,
        tickets=_tickets(settings.ticket_key),
        transfer=settings.transfer.embedding_transfer,
    )
    hosted = settings.encoding.hosted(_encoder(settings))
    return await app.run(settings, make_plan(hosted, settings.served_name, serving))


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
