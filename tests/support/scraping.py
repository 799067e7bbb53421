"""Scraping a metrics endpoint as Prometheus does."""

from __future__ import annotations

import asyncio
import urllib.request
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from prometheus_client import Metric
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

OPENMETRICS = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"


@dataclass(frozen=True)
class Scrape:
    """What one answer said."""

    content_type: str
    text: str

    @property
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
