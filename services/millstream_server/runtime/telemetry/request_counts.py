"""Counts of requests on worker streams, open and ended; used at both ends of a stream."""

from __future__ import annotations

from prometheus_client import Counter

from millstream_server.runtime.telemetry import metrics


class RequestCounts:
    """Counts of one role, with the labels set."""

    def __init__(self, role: str) -> None:
        """Look the metrics up once."""
        self._role = role
        self._open = metrics.STREAM_REQUESTS_OPEN.labels(role)
        self._outcomes: dict[str, Counter] = {}

    def begun(self) -> None:
        """Count a request as open."""
        self._open.inc()

    def ended(self, outcome: str) -> None:
        """Count a request as ended; ``outcome`` is its finish reason or its failure's reason."""
        self._open.dec()
        child = self._outcomes.get(outcome)
        if child is None:
            child = self._outcomes[outcome] = metrics.STREAM_REQUESTS.labels(self._role, outcome)
        child.inc()
