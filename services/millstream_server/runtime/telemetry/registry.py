"""The registry of our metrics, and how each kind is made in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.core import GaugeMetricFamily

# No `_created` series per counter and histogram: Prometheus doesn't need them. This holds for the
# whole process, so for SGLang's metrics too, which have none when SGLang serves them.
disable_created_metrics()  # type: ignore[no-untyped-call]

REGISTRY = CollectorRegistry(auto_describe=True)
"""Our own registry: in a worker SGLang uses the library's default one."""

ProcessCollector(registry=REGISTRY)
PlatformCollector(registry=REGISTRY)
GCCollector(registry=REGISTRY)


def counter(name: str, text: str, labels: Sequence[str] = ()) -> Counter:
    """Make a counter of ours; ``text`` is its help."""
    return Counter(name, text, labels, registry=REGISTRY)


def gauge(name: str, text: str, labels: Sequence[str] = ()) -> Gauge:
    """Make a gauge of ours; ``text`` is its help."""
    return Gauge(name, text, labels, registry=REGISTRY)


def histogram(name: str, text: str, labels: Sequence[str], buckets: Sequence[float]) -> Histogram:
    """Make a histogram of ours; ``text`` is its help."""
    return Histogram(name, text, labels, buckets=buckets, registry=REGISTRY)


class ScrapedGauge(NamedTuple):
    """A gauge whose collector gets the value at each scrape."""

    name: str
    text: str
    labels: tuple[str, ...]

    def family(self, value: float, labels: Sequence[str]) -> GaugeMetricFamily:
        """Make a family of one series, for a collector to yield."""
        family = GaugeMetricFamily(self.name, self.text, labels=self.labels)
        family.add_metric(labels, value)
        return family
