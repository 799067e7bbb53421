"""docs/metrics.md says what the code declares, and both say it as Prometheus' users expect."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from prometheus_client import CollectorRegistry, Counter

from millstream_server.processor.telemetry import ABANDONED
from millstream_server.runtime import errors
from millstream_server.runtime.errors import SERVER_FAULTS
from millstream_server.runtime.telemetry.metrics import REGISTRY
from tests.support.telemetry.scraping import (
    DOCUMENT,
    MADE_AT_SCRAPES,
    Documented,
    Row,
    declared,
    documented,
)

_TABLE, _DECLARED = documented(), declared()
_UNITS = {"seconds", "bytes", "tokens", "requests", "blocks", "1"}
# Units in which Prometheus' users don't count: the base unit is meant instead.
_NOT_BASE = re.compile(
    "_(ms|us|ns|milliseconds|microseconds|minutes|hours|kb|mb|gb|kib|mib|gib|percent)(_|$)"
)


def test_the_table_and_the_code_have_the_same_metrics() -> None:
    assert sorted(_TABLE) == sorted(_DECLARED)
    assert len(_TABLE) > 40


@pytest.mark.parametrize("row", _TABLE.values(), ids=lambda row: row.name)
def test_a_row_says_what_the_code_says(row: Documented) -> None:
    code = _DECLARED[row.name]
    assert (row.type, row.labels, row.text) == (code.type, code.labels, code.text)


@pytest.mark.parametrize("row", _TABLE.values(), ids=lambda row: row.name)
def test_a_row_names_its_unit_and_its_process(row: Documented) -> None:
    assert row.emitted_by in {"Processor", "worker", "both"}
    assert row.unit in _UNITS
    plain = row.name.removesuffix("_total")
    for unit in ("seconds", "bytes", "tokens", "requests", "blocks"):
        assert (row.unit == unit) >= plain.endswith("_" + unit)
        if unit in {"seconds", "bytes"}:
            assert (row.unit == unit) == plain.endswith("_" + unit)


@pytest.mark.parametrize("row", _DECLARED.values(), ids=lambda row: row.name)
def test_names_are_as_prometheus_wants_them(row: Row) -> None:
    assert re.fullmatch(r"(sglang:)?[a-z][a-z0-9_]*", row.name)
    assert "__" not in row.name
    assert row.name.endswith("_total") == (row.type == "counter")
    assert not row.name.endswith(("_count", "_sum", "_bucket", "_created"))
    assert not _NOT_BASE.search(row.name)
    assert row.type in {"counter", "gauge", "histogram"}
    if row.type == "histogram":
        assert row.name.endswith("_seconds")
    for label in row.labels:
        assert re.fullmatch("[a-z][a-z0-9_]*", label)
        assert label not in {"le", "quantile", "job", "instance"}
    assert row.text
    assert "|" not in row.text


def test_our_own_are_ours_by_name() -> None:
    known = ("millstream_", "gen_ai_", "rpc_", "http_", "process_", "python_")
    others = [name for name in _DECLARED if not name.startswith(known)]
    assert others == ["sglang:cache_config_info"]


def test_counters_and_histograms_have_no_second_series_for_their_birth() -> None:
    registry = CollectorRegistry()
    Counter("made_here", "after ours were imported", registry=registry)
    names = {s.name for source in (registry, REGISTRY) for f in source.collect() for s in f.samples}
    assert "made_here_total" in names
    assert [name for name in names if name.endswith("_created")] == []


def test_no_two_series_have_one_name() -> None:
    names = [name for names in REGISTRY._collector_to_names.values() for name in names]
    names += [gauge.name for gauge in MADE_AT_SCRAPES]
    assert len(names) == len(set(names))


def test_the_query_for_failed_turns_leaves_out_what_is_no_fault_of_the_server() -> None:
    (left_out,) = re.findall(r'error_type!~"(.*?)"', DOCUMENT.read_text())
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    failures = [kind for kind in kinds if issubclass(kind, errors.ServingError)]
    not_ours = {kind.reason for kind in failures if kind.code not in SERVER_FAULTS}
    never_a_turn = {"UNAUTHENTICATED", "PERMISSION_DENIED", "UNKNOWN_METHOD"} | {
        "ADAPTER_EXISTS",
        "OPERATION_CONFLICT",
        "ENGINE_BUSY",
        "INVALID_WEIGHTS",
    }
    assert set(left_out.split("|")) == {"", ABANDONED} | (not_ours - never_a_turn)


def test_what_a_process_says_before_anything_happened() -> None:
    """0 would be a certificate that expired in 1970; no series, no rise at a first refusal."""
    program = """
import millstream_server.runtime.telemetry.metrics
from millstream_server.runtime.telemetry.metrics import REGISTRY
print(REGISTRY.get_sample_value("millstream_certificate_expiry_timestamp_seconds"))
print(REGISTRY.get_sample_value("millstream_admission_refused_total", {"cause": "displaced"}))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert done.stdout.split() == [b"nan", b"0.0"]
