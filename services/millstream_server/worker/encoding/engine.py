"""An encoder as a worker's host uses it: with decoder processes, batches and a store."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from prometheus_client.core import Metric

from millstream_server.encoding.encoder import EncoderInfo, MediaEncoder
from millstream_server.engines.base import EngineLoad
from millstream_server.runtime.errors import ServingError, UnavailableError
from millstream_server.transfer.embeddings.store import EmbeddingStore
from millstream_server.worker.encoding.pipeline import Pipeline, PipelineOptions
from millstream_server.worker.engine_metrics import MetricsSource


class HostedEncoder:
    """Satisfies `worker.host.HostedEngine`; `pipeline` encodes."""

    def __init__(
        self, encoder: MediaEncoder, store: EmbeddingStore, options: PipelineOptions
    ) -> None:
        """Use ``encoder`` and ``store`` alone; `close` closes them."""
        self.store = store
        self.info: EncoderInfo | None = None
        """Its facts; None before `start`."""
        self._encoder = encoder
        self._options = options
        self._pipeline: Pipeline | None = None
        self._closed = False
        self._when_closing: list[Callable[[], None]] = []
        self.open_items: Callable[[], int] = lambda: 0
        """Returns how many items are open, for load reports."""

    @property
    def pipeline(self) -> Pipeline:
        """What encodes.

        Raises:
            UnavailableError: the model is still being loaded.
        """
        if self._pipeline is None:
            raise UnavailableError("this worker is still loading its model", retry_delay_s=1.0)
        return self._pipeline

    async def start(self, on_failure: Callable[[ServingError], None]) -> EncoderInfo:
        """See `Engine.start`."""
        info = await self._encoder.start(on_failure)
        at_once = info.max_running_requests or self._options.running_items
        self.info = info = replace(info, limits=self._options.limits, max_running_requests=at_once)
        self._pipeline = Pipeline(self._encoder, info, self.store, self._options)
        return info

    async def warm_up(self) -> None:
        """See `Engine.warm_up`."""
        await self._encoder.warm_up()

    async def load(self) -> EngineLoad:
        """Return the items in the tower, and those that wait."""
        running = self._pipeline.running if self._pipeline else 0
        return EngineLoad(
            running_requests=running,
            queued_requests=max(0, self.open_items() - running),
            used_blocks=0,
            total_blocks=0,
        )

    async def close(self) -> None:
        """See `Engine.close`."""
        if self._closed:
            return
        self._closed = True
        try:
            if self._pipeline:
                await self._pipeline.close()
            for callback in self._when_closing:
                callback()
        finally:
            await self._encoder.close()
            self.store.close()

    def when_closing(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` when the pipeline has stopped, before the store is closed."""
        self._when_closing.append(callback)

    def progress(self, dp_rank: int) -> int:
        """See `Probeable.progress`."""
        return self._encoder.progress(dp_rank)

    async def probe(self, dp_rank: int) -> None:
        """See `Probeable.probe`."""
        await self._encoder.probe(dp_rank)

    def metrics(self) -> Iterable[Metric]:
        """Return the encoder's own metrics, if it has any."""
        return self._encoder.metrics() if isinstance(self._encoder, MetricsSource) else ()
