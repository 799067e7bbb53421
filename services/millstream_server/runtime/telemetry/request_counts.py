"""Counts of requests on worker streams, open and ended; used at both ends of a stream."""

from __future__ import annotations

from collections import Counter

import prometheus_client

from millstream_server.runtime.telemetry import metrics

_OPEN: Counter[str] = Counter()
"""Open requests of the process, by role."""


class RequestCounts:
    """Counts of one role, with the labels set."""

    def __init__(self, role: str) -> None:
        """Look the metrics up once."""
        self._role = role
        # Read at each scrape, which is cheaper than to set the gauge at every request.
        metrics.STREAM_REQUESTS_OPEN.labels(role).set_function(lambda: _OPEN[role])
        self._outcomes: dict[str, prometheus_client.Counter] = {}

    def begun(self) -> None:
        """Count a request as open."""
        _OPEN[self._role] += 1

    def ended(self, outcome: str) -> None:
        """Count a request as ended; ``outcome`` is its finish reason or its failure's reason."""
        _OPEN[self._role] -= 1
        child = self._outcomes.get(outcome)
        if child is None:
            child = self._outcomes[outcome] = metrics.STREAM_REQUESTS.labels(self._role, outcome)
        child.inc()
