"""SGLang's metrics from files and from memory become one set; no SGLang is needed for it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Metric, generate_latest

from millstream_server.engines.sglang.config import SglangEngineConfig, engine_arguments
from millstream_server.engines.sglang.loads import KvBlocks
from millstream_server.engines.sglang.metrics import FILES, collect

BLOCKS = KvBlocks(16, 100)
VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
_OTHER_PROCESS = """
from prometheus_client import Counter, Gauge, Histogram
Gauge("sglang:num_running_reqs", "of all", ["tp_rank"], multiprocess_mode="mostrecent").labels(0).set(5)
Counter("sglang:cpu_seconds_total", "of each", ["component"]).labels("scheduler").inc(3)
Counter("somebody_elses", "text").inc()
Histogram("sglang:took_seconds", "text", buckets=(1, 2)).observe(1.5)
"""  # noqa: E501 - a program


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv(VARIABLE, "/nowhere")
    FILES.open()
    yield Path(os.environ[VARIABLE])
    FILES.close()


@pytest.fixture
def in_memory() -> Iterator[None]:
    """What the tokenizer manager keeps in this process."""
    seconds = Counter("sglang:cpu_seconds_total", "of each", ["component"])
    seconds.labels("tokenizer").inc(2)
    ours = Gauge("not_sglangs", "text")
    yield
    for metric in (seconds, ours):
        REGISTRY.unregister(metric)


def _run_other_process() -> None:
    subprocess.run([sys.executable, "-c", _OTHER_PROCESS], check=True)


def _by_name() -> dict[str, Metric]:
    families = list(collect(BLOCKS))
    assert len({family.name for family in families}) == len(families)
    return {family.name: family for family in families}


def _values(family: Metric) -> dict[tuple[str, ...], float]:
    return {(s.name, *s.labels.values()): s.value for s in family.samples}


@pytest.mark.usefixtures("in_memory")
def test_files_and_memory_are_one(files: Path) -> None:
    _run_other_process()
    found = _by_name()
    assert sorted(found) == [
        "sglang:cache_config_info",
        "sglang:cpu_seconds",
        "sglang:num_running_reqs",
        "sglang:took_seconds",
    ]
    seconds = found["sglang:cpu_seconds"]
    assert (seconds.type, seconds.documentation) == ("counter", "of each")
    name = "sglang:cpu_seconds_total"
    assert _values(seconds) == {(name, "scheduler"): 3, (name, "tokenizer"): 2}
    assert _values(found["sglang:num_running_reqs"]) == {("sglang:num_running_reqs", "0"): 5}
    took = _values(found["sglang:took_seconds"])
    assert took["sglang:took_seconds_bucket", "2.0"] == 1
    assert took["sglang:took_seconds_sum",] == 1.5
    assert files.is_dir()


@pytest.mark.usefixtures("files", "in_memory")
def test_a_series_in_both_is_told_once() -> None:
    _run_other_process()
    REGISTRY._names_to_collectors[  # the tokenizer's, told of another component too
        "sglang:cpu_seconds_total"
    ].labels("scheduler").inc(1)  # type: ignore[attr-defined]
    series = [s.labels["component"] for s in _by_name()["sglang:cpu_seconds"].samples]
    assert sorted(series) == ["scheduler", "tokenizer"]


@pytest.mark.usefixtures("in_memory")
def test_our_own_file_is_not_counted_twice(files: Path) -> None:
    """An environment that names a directory has the library keep our numbers in files too."""
    _run_other_process()
    for path in files.glob("counter_*.db"):
        path.rename(files / f"counter_{os.getpid()}.db")
    assert _values(_by_name()["sglang:cpu_seconds"]) == {
        ("sglang:cpu_seconds_total", "tokenizer"): 2
    }


@pytest.mark.usefixtures("files")
def test_the_cache_is_described_unless_sglang_does_so_itself() -> None:
    (ours,) = _by_name()["sglang:cache_config_info"].samples
    assert (ours.labels, ours.value) == ({"page_size": "16", "num_pages": "100"}, 1)
    theirs = Gauge("sglang:cache_config_info", "text", ["page_size"])
    theirs.labels("64").set(1)
    try:
        (only,) = _by_name()["sglang:cache_config_info"].samples
    finally:
        REGISTRY.unregister(theirs)
    assert only.labels == {"page_size": "64"}


def test_the_directory_is_ours_and_goes_away(files: Path) -> None:
    assert str(files) != "/nowhere"
    (files / "counter_1.db").touch()
    FILES.close()
    FILES.close()
    assert not files.exists()
    assert VARIABLE not in os.environ
    assert FILES.of_other_processes() == []
    assert "sglang:cache_config_info" in _by_name()


@pytest.mark.parametrize("metrics", [True, False])
def test_the_setting_is_sglangs_argument(*, metrics: bool) -> None:
    config = SglangEngineConfig(
        model_path="m", device="cuda", metrics=metrics, served_model_name="tiny"
    )
    known = {"model_path", "device", "dtype", "log_level", "skip_tokenizer_init", "enable_metrics"}
    known |= {"incremental_streaming_output", "disaggregation_mode", "served_model_name"}
    arguments = engine_arguments(config, known)
    assert arguments["enable_metrics"] is metrics
    assert arguments["served_model_name"] == "tiny"


def test_what_is_collected_can_be_written() -> None:
    registry = CollectorRegistry()

    class Source:
        def collect(self) -> list[Metric]:
            return list(collect(BLOCKS))

    registry.register(Source())
    text = generate_latest(registry).decode()
    assert 'sglang:cache_config_info{num_pages="100",page_size="16"} 1.0' in text
