"""Metrics of worker streams, for both ends; recorded per frame and request, not per token."""

from __future__ import annotations

import functools

from millstream_server.engines.base import Role
from millstream_server.runtime.telemetry import metrics
from millstream_server.runtime.telemetry.counts import RequestCounts


class StreamMetrics(RequestCounts):
    """Metrics of one role, with the labels set."""

    def __init__(self, role: Role) -> None:
        """Look the metrics up once."""
        super().__init__(role.value)
        self._frames = metrics.STREAM_FRAMES.labels(role.value)
        self._tokens = metrics.STREAM_TOKENS.labels(role.value)
        self.workers_lost = metrics.WORKERS_LOST.labels(role.value)

    def frame(self, tokens: int) -> None:
        """Count a step frame."""
        self._frames.inc()
        self._tokens.inc(tokens)


@functools.cache
def stream_metrics(role: Role) -> StreamMetrics:
    """Return a role's metrics."""
    return StreamMetrics(role)
