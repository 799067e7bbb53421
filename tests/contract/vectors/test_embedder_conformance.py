"""Every embedder and ranker: simulated ones, and engines on the classes of model they take."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest

from tests.support.engines import embedder_checks
from tests.support.engines.embedder_checks import SGLANG, SIMULATED, TRANSFORMERS, VLLM
from tests.support.engines.engines import HAS_VLLM
from tests.support.models.vector_models import Kind, make_vector_model
from tests.support.processes import forked

Outcomes = Callable[[str], dict[str, str]]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """Run all checks of an embedder once; one test reads one outcome."""
    known: dict[str, dict[str, str]] = {}

    def run(kind: str) -> dict[str, str]:
        if kind not in known:
            folder = tmp_path_factory.mktemp(kind)
            known[kind] = (
                asyncio.run(embedder_checks.run_all(folder, kind))
                if kind in SIMULATED
                else asyncio.run(embedder_checks.run_all(_wide(folder, kind), kind))
                if HAS_VLLM
                else _forked(make_vector_model(folder, cast("Kind", kind)), kind)
            )
        return known[kind]

    return run


def _wide(folder: Path, kind: str) -> Path:
    """Make a model whose heads vLLM's attention on a CPU takes."""
    return make_vector_model(folder, cast("Kind", kind), head=32)


def _forked(model: Path, kind: str) -> dict[str, str]:
    done = forked.run("sglang", "tests.support.engines.embedder_checks", str(model), kind)
    assert done.returncode == 0, done.stderr[-6000:]
    found: dict[str, str] = json.loads(done.stdout)
    return found


@pytest.mark.timeout(300)
@pytest.mark.parametrize("check", embedder_checks.CHECKS)
@pytest.mark.parametrize(
    "kind",
    [
        *SIMULATED,
        *(pytest.param(kind, marks=pytest.mark.sglang) for kind in (*SGLANG, *TRANSFORMERS)),
        *(pytest.param(kind, marks=pytest.mark.vllm, id=f"vllm-{kind}") for kind in VLLM),
    ],
)
def test_embedder(outcomes: Outcomes, kind: str, check: str) -> None:
    outcome = outcomes(kind)[check]
    assert not outcome, outcome
