"""A worker's engine in Prometheus: its load and its own metrics, read at each scrape."""

from __future__ import annotations

import asyncio
import concurrent.futures
import time
from collections.abc import Iterable, Iterator
from typing import Protocol, runtime_checkable

from prometheus_client.core import Metric

from millstream_server.control.engine import Engine, EngineInfo, EngineLoad, Role
from millstream_server.runtime.telemetry.log import get_log
from millstream_server.runtime.telemetry.metrics import (
    CANARY_DURATION,
    CANARY_FAILURES,
    ENGINE_INFO,
    ENGINE_LOAD_AGE,
    ENGINE_MOST,
    ENGINE_QUEUED,
    ENGINE_RUNNING,
    ENGINE_TOTAL_BLOCKS,
    ENGINE_USED_BLOCKS,
)

log = get_log(__name__)
_LOAD_LIMIT_S = 1.5  # the SGLang adapter takes up to 1 s


def record_canary(dp_rank: int, took_s: float | None) -> None:
    """Count a canary's probe; None: it failed or didn't end in time."""
    # Made with the first canary, so that the first failure shows as an increase from 0.
    failures = CANARY_FAILURES.labels(str(dp_rank))
    if took_s is None:
        failures.inc()
    else:
        CANARY_DURATION.labels(str(dp_rank)).observe(took_s)


@runtime_checkable
class MetricsSource(Protocol):
    """An engine with metrics of its own; optional."""

    def metrics(self) -> Iterable[Metric]:
        """Return the vendor's metrics, under the vendor's names; called from any thread."""
        ...


class EngineMetrics:
    """A Prometheus collector for one engine.

    `ready` is called on the event loop, `collect` from any other thread. If the engine or the loop
    doesn't respond in time, the scrape gets the last values and their age.
    """

    def __init__(self, engine: Engine, role: Role, model: str) -> None:
        self._engine = engine
        self._labels = (model, role.value)
        self._info: EngineInfo | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._last: tuple[EngineLoad, float] | None = None

    def ready(self, info: EngineInfo) -> None:
        self._loop = asyncio.get_running_loop()
        self._info = info

    def collect(self) -> Iterator[Metric]:
        if self._info is None or self._loop is None:
            return
        versions = (self._info.engine, self._info.engine_version, self._info.device)
        yield ENGINE_INFO.family(1, (*self._labels, *versions))
        yield ENGINE_MOST.family(self._info.max_running_requests, self._labels)
        self._ask(self._loop)
        if self._last is not None:
            yield from self._load_families(*self._last)
        if isinstance(self._engine, MetricsSource):
            yield from _own_families(self._engine)

    def _ask(self, loop: asyncio.AbstractEventLoop) -> None:
        asked: concurrent.futures.Future[EngineLoad] | None = None
        load = self._engine.load()
        try:
            asked = asyncio.run_coroutine_threadsafe(load, loop)
            self._last = (asked.result(_LOAD_LIMIT_S), time.monotonic())
        except Exception as error:  # noqa: BLE001 - a dead engine or loop must not end the scrape
            if asked is None:
                load.close()  # the loop is closed
            else:
                asked.cancel()
            log.debug("the engine's load is unknown", error=error)

    def _load_families(self, load: EngineLoad, asked_at: float) -> Iterator[Metric]:
        yield ENGINE_RUNNING.family(load.running_requests, self._labels)
        yield ENGINE_QUEUED.family(load.queued_requests, self._labels)
        yield ENGINE_USED_BLOCKS.family(load.used_blocks, self._labels)
        yield ENGINE_TOTAL_BLOCKS.family(load.total_blocks, self._labels)
        yield ENGINE_LOAD_AGE.family(time.monotonic() - asked_at, self._labels)


def _own_families(source: MetricsSource) -> list[Metric]:
    try:
        return list(source.metrics())
    except Exception as error:  # noqa: BLE001 - a dead engine or loop must not end the scrape
        log.error("the engine's own metrics can't be read", error=error)
        return []
