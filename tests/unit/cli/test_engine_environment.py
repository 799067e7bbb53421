"""The Python in which `millstream up` starts an engine's workers."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from millstream_server.cli.suite import plan
from millstream_server.cli.suite.models import PlanError


def test_most_engines_run_where_the_suite_does() -> None:
    for engine in ("sglang", "simulated"):
        assert plan.python_of(engine) == sys.executable


def test_vllm_runs_in_its_own_beside_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    monkeypatch.setattr(sys, "prefix", str(tmp_path / ".venv"))
    monkeypatch.setattr(plan, "__file__", str(tmp_path / "a/b/c/d/plan.py"))
    with pytest.raises(PlanError, match="make setup-vllm"):
        plan.python_of("vllm")
    python = tmp_path / ".venv-vllm" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    assert plan.python_of("vllm") == str(python)


def test_where_vllm_is_installed_all_run_there(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.find_spec("pytest")
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: spec)
    assert plan.python_of("vllm") == sys.executable
