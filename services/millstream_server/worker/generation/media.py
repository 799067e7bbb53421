"""A generating worker's fetcher of embeddings, made from its settings."""

from __future__ import annotations

from millstream_server.runtime.telemetry.tracing import Tracing
from millstream_server.transfer.embeddings.leases import Leases
from millstream_server.transfer.embeddings.ticket import EmbeddingTickets
from millstream_server.transfer.ticket import TicketKey
from millstream_server.worker.embeddings.fetch import EmbeddingFetcher, fetch_tls
from millstream_server.worker.settings import WorkerSettings


class EmbeddingSource:
    """Makes one fetcher for the worker's life, once its host is there.

    Order of calls: `use_local`, if the process encodes too; `open`; `close`.
    """

    def __init__(self, settings: WorkerSettings, key: TicketKey) -> None:
        """Check tickets with ``key``.

        Raises:
            SettingsError: a TLS file is missing or invalid.
        """
        self._settings = settings
        self._key = key
        self._tls = fetch_tls(settings.embedding_fetch)
        self._local: Leases | None = None
        self._fetcher: EmbeddingFetcher | None = None

    def use_local(self, leases: Leases) -> None:
        """Read what this process itself encodes without a transfer."""
        self._local = leases

    def open(self, tracing: Tracing | None) -> EmbeddingFetcher:
        """Make the fetcher."""
        self._fetcher = EmbeddingFetcher(
            EmbeddingTickets(self._key),
            transfer=self._settings.embedding.embedding_transfer,
            tls=self._tls,
            local=self._local,
            tracing=tracing,
        )
        return self._fetcher

    async def close(self) -> None:
        """Close its channels; fetches that run fail."""
        if self._fetcher is not None:
            await self._fetcher.close()
