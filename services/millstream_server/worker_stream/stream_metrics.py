"""Metrics of worker streams, the same at both ends; per frame and per request, never per token."""

from __future__ import annotations

import functools

from prometheus_client import Counter

from millstream_server.engines.base import Role
from millstream_server.runtime import metrics


class StreamMetrics:
    """Those of one role, with the labels filled in."""

    def __init__(self, role: Role) -> None:
        """Look the metrics up once."""
        self._role = role.value
        self._open = metrics.STREAM_REQUESTS_OPEN.labels(self._role)
        self._frames = metrics.STREAM_FRAMES.labels(self._role)
        self._tokens = metrics.STREAM_TOKENS.labels(self._role)
        self._outcomes: dict[str, Counter] = {}
        self.workers_lost = metrics.WORKERS_LOST.labels(self._role)

    def frame(self, tokens: int) -> None:
        """Count a step frame."""
        self._frames.inc()
        self._tokens.inc(tokens)

    def begun(self) -> None:
        """Count a request in."""
        self._open.inc()

    def ended(self, outcome: str) -> None:
        """Count a request out; ``outcome`` names its finish reason or its failure's reason."""
        self._open.dec()
        child = self._outcomes.get(outcome)
        if child is None:
            child = self._outcomes[outcome] = metrics.STREAM_REQUESTS.labels(self._role, outcome)
        child.inc()


@functools.cache
def stream_metrics(role: Role) -> StreamMetrics:
    """Answer a role's metrics."""
    return StreamMetrics(role)
