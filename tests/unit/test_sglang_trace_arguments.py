"""How SGLang is told to trace."""

from __future__ import annotations

import re

import pytest

from millstream_server.control.engine import Role
from millstream_server.engines.sglang.config import (
    SglangEngineConfig,
    engine_arguments,
    engine_environment,
)
from millstream_server.runtime.errors import EngineFailedError


def _config(endpoint: str, role: Role = Role.AGGREGATED) -> SglangEngineConfig:
    return SglangEngineConfig(model_path="m", role=role, device="cuda", otlp_endpoint=endpoint)


@pytest.mark.parametrize(
    ("endpoint", "theirs"),
    [
        ("http://collector:4317", "collector:4317"),
        ("https://collector:4317", "https://collector:4317"),
    ],
)
def test_the_collector_is_named_as_sglang_wants_it(endpoint: str, theirs: str) -> None:
    arguments = engine_arguments(_config(endpoint), _names())
    assert arguments["enable_trace"] is True
    assert arguments["otlp_traces_endpoint"] == theirs


def test_without_a_collector_sglang_traces_nothing() -> None:
    assert not [name for name in engine_arguments(_config(""), _names()) if "trace" in name]
    assert "SGLANG_TRACE_LEVEL" not in engine_environment(_config("", Role.DECODE))


@pytest.mark.parametrize("role", Role)
def test_sglang_makes_no_span_a_token(role: Role) -> None:
    assert engine_environment(_config("http://c:1", role))["SGLANG_TRACE_LEVEL"] == "1"


def _names() -> set[str]:
    """Name every argument of an SGLang; which it has is `test_vendor`'s business."""
    config = _config("http://c:1")
    try:
        engine_arguments(config, set())
    except EngineFailedError as error:
        return set(re.findall(r"[a-z_]+", error.message))
    raise AssertionError
