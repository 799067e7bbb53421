"""SGLang's own `sglang:` metrics, passed on as they are, and the one that gateways miss.

SGLang's processes keep theirs in files of the Prometheus library's multiprocess mode. The part of
SGLang that runs in our process (its tokenizer manager) keeps them in memory, in the library's
default registry: the library settles on files or memory when it is first imported, which here is
long before SGLang names the directory. So what is served is the files of the other processes, and
the default registry.
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

from millstream_server.engines.base import EngineInfo
from millstream_server.runtime.metrics import SGLANG_CACHE_CONFIG

_PREFIX = "sglang:"
_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"


class MetricsFiles:
    """The directory for the metrics of SGLang's processes."""

    def __init__(self) -> None:
        """Make none yet."""
        self._directory: Path | None = None

    def open(self) -> None:
        """Make the directory that processes started from now on write to.

        Ours also when the environment names one: the numbers of others may lie there.
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
        """Name the files; our own numbers, if they are in files at all, are in memory too."""
        if self._directory is None:
            return []
        ours = f"_{os.getpid()}.db"
        return [str(p) for p in self._directory.glob("*.db") if not p.name.endswith(ours)]


FILES = MetricsFiles()
"""One for the process, as everything of SGLang is."""


def collect(info: EngineInfo) -> Iterable[Metric]:
    """Give every `sglang:` family once, and each of its series once."""
    families: dict[str, Metric] = {}
    for family in _everything():
        if family.name.startswith(_PREFIX):
            known = families.setdefault(
                family.name, Metric(family.name, family.documentation, family.type)
            )
            _add(known, family.samples)
    # SGLang doesn't say it; a later one that does is right.
    families.setdefault(SGLANG_CACHE_CONFIG.name, _cache_config(info))
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


def _cache_config(info: EngineInfo) -> Metric:
    return SGLANG_CACHE_CONFIG.family(1, (str(info.block_size), str(info.total_blocks)))
