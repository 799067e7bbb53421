"""SGLang's own `sglang:` metrics, unchanged, and one more that gateways need.

SGLang's child processes keep their metrics in files (the Prometheus library's multiprocess mode).
The part of SGLang in this process, its tokenizer manager, keeps them in memory, in the library's
default registry: the library chooses between files and memory at its first import, which here
is before SGLang sets the directory. So both the files and the default registry are served.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from prometheus_client import REGISTRY as DEFAULT_REGISTRY
from prometheus_client.core import Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.samples import Sample

from millstream_server.engines.sglang.loads import KvBlocks
from millstream_server.runtime.telemetry.metrics import ScrapedGauge

CACHE_CONFIG = ScrapedGauge(
    "sglang:cache_config_info",
    "1; its labels say how SGLang's KV cache is divided",
    ("page_size", "num_pages"),
)
"""Defined here; all others are SGLang's own."""

_PREFIX = "sglang:"
_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"


class MetricsFiles:
    """The directory for the metrics of SGLang's processes."""

    def __init__(self) -> None:
        self._directory: Path | None = None

    def open(self) -> None:
        """Make the directory for processes started from now on.

        A new one, even if the environment names one: that may hold other processes' metrics.
        """
        self._directory = Path(tempfile.mkdtemp(prefix="millstream-metrics-"))
        os.environ[_VARIABLE] = str(self._directory)

    def close(self) -> None:
        """Remove it; may be called twice, and without `open`."""
        if self._directory is not None:
            os.environ.pop(_VARIABLE, None)
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None

    def of_other_processes(self) -> list[str]:
        """List the other processes' files: this process's metrics are in memory."""
        if self._directory is None:
            return []
        ours = f"_{os.getpid()}.db"
        return [str(p) for p in self._directory.glob("*.db") if not p.name.endswith(ours)]


FILES = MetricsFiles()
"""One per process, as SGLang itself."""


def collect(blocks: KvBlocks) -> Iterable[Metric]:
    """Return every `sglang:` family once, and each of its series once."""
    families: dict[str, Metric] = {}
    for family in _everything():
        if family.name.startswith(_PREFIX):
            known = families.setdefault(
                family.name, Metric(family.name, family.documentation, family.type)
            )
            _add(known, family.samples)
    # Unless a later SGLang has this metric itself.
    ours = CACHE_CONFIG.family(1, (str(blocks.size), str(blocks.total)))
    families.setdefault(CACHE_CONFIG.name, ours)
    return families.values()


def _everything() -> Iterator[Metric]:
    files = FILES.of_other_processes()
    yield from MultiProcessCollector.merge(files)  # type: ignore[no-untyped-call]
    yield from DEFAULT_REGISTRY.collect()


def _add(family: Metric, samples: Iterable[Sample]) -> None:
    seen = {_series(sample) for sample in family.samples}
    family.samples += [sample for sample in samples if _series(sample) not in seen]


def _series(sample: Sample) -> tuple[str, frozenset[tuple[str, str]]]:
    return sample.name, frozenset(sample.labels.items())
