"""docs/metrics.md and what the code declares, in one shape."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from prometheus_client.metrics import MetricWrapperBase

from millstream_server.runtime.metrics import REGISTRY, SCRAPED

DOCUMENT = Path(__file__).parents[2] / "docs" / "metrics.md"


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
    rows = [Row(g.name, "gauge", frozenset(g.labels), g.text) for g in SCRAPED]
    for collector in REGISTRY._collector_to_names:
        for family in collector.collect():
            labels = {label for sample in family.samples for label in sample.labels}
            if isinstance(collector, MetricWrapperBase):
                labels = set(collector._labelnames)
            name = family.name + ("_total" if family.type == "counter" else "")
            rows.append(Row(name, family.type, frozenset(labels), family.documentation))
    return {row.name: row for row in rows}
