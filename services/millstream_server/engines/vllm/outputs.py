"""The one task that takes the output of vLLM's core processes: a message per step of a rank."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable
from typing import Any

from millstream_server.engines.vllm.launch import BuiltEngine
from millstream_server.engines.vllm.metrics import VllmMetrics
from millstream_server.runtime.telemetry.log import get_log

log = get_log(__name__)


class Outputs:
    """Hands out each request's part of a message, in order; remembers each rank's statistics."""

    def __init__(self, take: Callable[[Any, str], None], lose: Callable[[str], None]) -> None:
        """``take`` gets a vLLM `EngineCoreOutput` and the weights' version; it doesn't raise.

        ``lose`` is called when there is no more output: vLLM has ended.
        """
        self.stats: dict[int, Any] = {}
        """vLLM's last `SchedulerStats` of each rank; an idle rank sends none."""
        self._take = take
        self._lose = lose
        self._metrics: VllmMetrics | None = None
        self._steps: Counter[int] = Counter()
        self._client: Any = None
        self._reader: asyncio.Task[None] | None = None

    def start(self, built: BuiltEngine, metrics: VllmMetrics | None = None) -> None:
        """Read from now on; ``metrics`` get every message."""
        self._metrics = metrics
        self._client = built.client
        self._reader = asyncio.create_task(self._read(), name="vllm-outputs")

    def steps(self, rank: int) -> int:
        """Return how many messages of a rank have come."""
        return self._steps[rank]

    def forget(self, core_id: str) -> None:
        """Expect no output of a request any more; may be called of any."""
        if self._metrics is not None:
            self._metrics.forget(core_id)

    async def _read(self) -> None:
        while True:
            try:
                outputs = await self._client.get_output_async()
            except Exception as error:  # noqa: BLE001 - of the vendor: it is dead, whatever it says
                self._lose(f"its output ended: {type(error).__name__}")
                return
            rank = outputs.engine_index
            self._steps[rank] += 1
            if outputs.scheduler_stats is not None:
                self.stats[rank] = outputs.scheduler_stats
            if self._metrics is not None:
                self._count(self._metrics, outputs)
            version = outputs.weight_version or ""
            for output in outputs.outputs:
                self._take(output, version)
            # The queue may hold more: other tasks would get no turn.
            await asyncio.sleep(0)

    def _count(self, metrics: VllmMetrics, outputs: Any) -> None:
        try:
            metrics.step(outputs)
        except Exception as error:  # noqa: BLE001 - of the vendor: it must not end all requests
            log.error("vLLM's own metrics stop: it failed to count", error=error)
            self._metrics = None

    async def barrier(self) -> None:
        """Wait until every rank has carried out what it got before, and its output was taken."""
        await self._client.is_scheduler_paused_async()
        # What came before the answer is in a queue.
        queue = self._client.outputs_queue
        while not queue.empty():  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(0)

    async def close(self) -> None:
        """Stop reading."""
        if self._reader is not None:
            self._reader.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._reader
