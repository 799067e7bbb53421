"""Scraping a metrics endpoint as Prometheus does, and the metrics that docs/metrics.md lists."""

from __future__ import annotations

import asyncio
import functools
import re
import urllib.request
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from prometheus_client import Metric
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from millstream_server.engines.sglang.metrics import CACHE_CONFIG
from millstream_server.runtime.telemetry import metrics
from millstream_server.runtime.telemetry.metrics import REGISTRY

OPENMETRICS = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"


@dataclass(frozen=True)
class Scrape:
    """What one answer said."""

    content_type: str
    text: str

    @functools.cached_property
    def families(self) -> dict[str, Metric]:
        """Parse it; checks that no family and no series is there twice."""
        parse = (
            openmetrics.text_string_to_metric_families
            if self.content_type.startswith("application/openmetrics-text")
            else text_string_to_metric_families
        )
        found: Iterable[Metric] = parse(self.text)
        families = list(found)
        series = Counter(
            (sample.name, frozenset(sample.labels.items()))
            for family in families
            for sample in family.samples
        )
        assert [key for key, count in series.items() if count > 1] == []
        by_name = {family.name: family for family in families}
        assert len(by_name) == len(families)
        return by_name

    def value(self, series: str, **labels: str) -> float:
        """Give the value of the one series of this name that has these labels."""
        (value,) = (
            sample.value
            for family in self.families.values()
            for sample in family.samples
            if sample.name == series and sample.labels.items() >= labels.items()
        )
        return value


async def scrape(port: int, accept: str = "text/plain", path: str = "/metrics") -> Scrape:
    """Ask the endpoint on this machine's ``port``."""
    return await asyncio.to_thread(scrape_now, port, accept, path)


def scrape_now(port: int, accept: str = "text/plain", path: str = "/metrics") -> Scrape:
    """Likewise, from another thread than the event loop's."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=10) as answer:  # noqa: S310
        return Scrape(answer.headers["Content-Type"], answer.read().decode())


@dataclass(frozen=True)
class LoopPieces:
    """How long a process's event loop was held in one piece, by the stall watch's own figures."""

    counts: dict[float, float]
    """By the upper edge of a bucket, in seconds: pieces that took at most so long."""

    @classmethod
    def of(cls, metrics_port: int) -> LoopPieces:
        """Ask a process on this machine."""
        family = scrape_now(metrics_port).families["millstream_event_loop_piece_seconds"]
        buckets = (one for one in family.samples if one.name.endswith("_bucket"))
        return cls({float(one.labels["le"]): one.value for one in buckets})

    def since(self, before: LoopPieces) -> LoopPieces:
        """Leave out what an earlier answer had."""
        return LoopPieces({edge: n - before.counts[edge] for edge, n in self.counts.items()})

    def __add__(self, other: LoopPieces) -> LoopPieces:
        """Take both together."""
        return LoopPieces({edge: n + other.counts[edge] for edge, n in self.counts.items()})

    def within_ms(self, share: float = 1.0) -> float:
        """Return the edge of the bucket below which such a share of the pieces is, in ms."""
        wanted = share * max(self.counts.values())
        return min(edge for edge, count in self.counts.items() if count >= wanted) * 1e3


MADE_AT_SCRAPES = (
    *(found for found in vars(metrics).values() if isinstance(found, metrics.ScrapedGauge)),
    CACHE_CONFIG,
)
"""Ours and the adapters' own."""
DOCUMENT = Path(__file__).parents[3] / "docs" / "metrics.md"


@dataclass(frozen=True)
class Row:
    """One metric as operators see it; a counter's name ends in _total."""

    name: str
    type: str
    labels: frozenset[str]
    text: str


@dataclass(frozen=True)
class Documented(Row):
    unit: str
    emitted_by: str


def documented() -> dict[str, Documented]:
    """Read the table."""
    rows: dict[str, Documented] = {}
    for line in DOCUMENT.read_text().splitlines():
        if line.startswith("| `"):
            name, kind, unit, labels, text, by = (c.strip() for c in line.strip("|").split("|"))
            name = name.strip("`")
            assert name not in rows, f"{name} is there twice"
            rows[name] = Documented(
                name, kind, frozenset(re.findall("`(.+?)`", labels)), text, unit, by
            )
    return rows


def declared() -> dict[str, Row]:
    """Ask the registry, and the gauges made at scrape time."""
    rows = [Row(g.name, "gauge", frozenset(g.labels), g.text) for g in MADE_AT_SCRAPES]
    for collector in REGISTRY._collector_to_names:
        for family in collector.collect():
            labels = {label for sample in family.samples for label in sample.labels}
            if isinstance(collector, MetricWrapperBase):
                labels = set(collector._labelnames)
            name = family.name + ("_total" if family.type == "counter" else "")
            rows.append(Row(name, family.type, frozenset(labels), family.documentation))
    return {row.name: row for row in rows}
