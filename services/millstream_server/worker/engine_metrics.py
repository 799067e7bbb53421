"""What Prometheus learns about a worker's engine: its load, asked for at each scrape."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import time
from collections.abc import Iterator

from prometheus_client.core import Metric

from millstream_server.engines import sglang_metrics
from millstream_server.engines.base import Engine, EngineInfo, EngineLoad, Role
from millstream_server.runtime.metrics import (
    CANARY_DURATION,
    CANARY_FAILURES,
    ENGINE_INFO,
    ENGINE_LOAD_AGE,
    ENGINE_QUEUED,
    ENGINE_RUNNING,
    ENGINE_TOTAL_BLOCKS,
    ENGINE_USED_BLOCKS,
)

_log = logging.getLogger(__name__)
_LOAD_LIMIT_S = 1.5  # the SGLang adapter itself takes up to 1 s


def record_canary(dp_rank: int, took_s: float | None) -> None:
    """Count a canary generation; None: it failed, or was not done in time."""
    # Made with the first canary, or the first failure would not show as a rise from 0.
    failures = CANARY_FAILURES.labels(str(dp_rank))
    if took_s is None:
        failures.inc()
    else:
        CANARY_DURATION.labels(str(dp_rank)).observe(took_s)


class EngineMetrics:
    """A Prometheus collector for one engine.

    `ready` is called on the event loop, `collect` from any other thread. When the engine or the
    loop doesn't answer in time, the scrape gets the last values and how old they are.
    """

    def __init__(self, engine: Engine, role: Role, model: str) -> None:
        """Nothing is collected before `ready`."""
        self._engine = engine
        self._labels = (model, role.value)
        self._info: EngineInfo | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._last: tuple[EngineLoad, float] | None = None

    def ready(self, info: EngineInfo) -> None:
        """The engine is loaded and warm."""
        self._loop = asyncio.get_running_loop()
        self._info = info

    def collect(self) -> Iterator[Metric]:
        """Yield the engine's gauges, and what SGLang counts itself."""
        if self._info is None or self._loop is None:
            return
        versions = (self._info.engine, self._info.engine_version)
        yield ENGINE_INFO.family(1, (*self._labels, *versions))
        self._ask(self._loop)
        if self._last is not None:
            yield from self._load_families(*self._last)
        if self._info.engine == "sglang":
            yield from _sglang_families(self._info)

    def _ask(self, loop: asyncio.AbstractEventLoop) -> None:
        answer: concurrent.futures.Future[EngineLoad] | None = None
        question = self._engine.load()
        try:
            answer = asyncio.run_coroutine_threadsafe(question, loop)
            self._last = (answer.result(_LOAD_LIMIT_S), time.monotonic())
        except Exception as error:  # noqa: BLE001 - a dead engine or loop must not end the scrape
            if answer is None:
                question.close()  # the loop is closed
            else:
                answer.cancel()
            _log.debug("the engine's load is unknown", exc_info=error)

    def _load_families(self, load: EngineLoad, asked_at: float) -> Iterator[Metric]:
        yield ENGINE_RUNNING.family(load.running_requests, self._labels)
        yield ENGINE_QUEUED.family(load.queued_requests, self._labels)
        yield ENGINE_USED_BLOCKS.family(load.used_blocks, self._labels)
        yield ENGINE_TOTAL_BLOCKS.family(load.total_blocks, self._labels)
        yield ENGINE_LOAD_AGE.family(time.monotonic() - asked_at, self._labels)


def _sglang_families(info: EngineInfo) -> list[Metric]:
    try:
        return list(sglang_metrics.collect(info))
    except Exception:  # noqa: BLE001 - the vendor's seam: its files may be gone or half written
        _log.exception("SGLang's metrics can't be read")
        return []
