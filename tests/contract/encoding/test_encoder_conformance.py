"""Every encoder of images and videos, on every model family that it takes."""

from __future__ import annotations

import asyncio
import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest

from tests.support.engines import encoder_checks
from tests.support.engines.encoder_checks import PIXELS, STOCK_SGLANG
from tests.support.models.vision_models import FAMILIES, FamilyName, make_vision_model
from tests.support.processes import forked
from tests.support.vendor import trap

Outcomes = Callable[[FamilyName, str], dict[str, str]]

_HERE = [(family, tower) for tower in ("transformers", PIXELS) for family in FAMILIES]
_SGLANG: list[tuple[FamilyName, str]] = [("qwen2_5_vl", "sglang"), ("qwen3_vl", "sglang")]
_CASES = [
    *(pytest.param(*case, id="-".join(case)) for case in _HERE),
    *(pytest.param(*case, id="-".join(case), marks=pytest.mark.sglang) for case in _SGLANG),
]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """Run all checks of an encoder once; one test reads one outcome."""
    known: dict[tuple[FamilyName, str], dict[str, str]] = {}

    def run(family: FamilyName, tower: str) -> dict[str, str]:
        key = (family, tower)
        if key not in known:
            directory = make_vision_model(tmp_path_factory.mktemp(family), family)
            known[key] = (_forked if "sglang" in tower else _here)(directory, family, tower)
        return known[key]

    return run


def _here(directory: Path, family: FamilyName, tower: str) -> dict[str, str]:
    # What `engines.sglang.cpu` sets is not for the processes that other tests start.
    with warnings.catch_warnings(), mock.patch.dict(os.environ):
        warnings.simplefilter("ignore")  # the vendors' own
        return asyncio.run(encoder_checks.run_all(directory, family, tower))


def _forked(directory: Path, family: FamilyName, tower: str) -> dict[str, str]:
    done = forked.run(
        "sglang", "tests.support.engines.encoder_checks", str(directory), family, tower
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout)
    return found


@pytest.mark.timeout(300)
@pytest.mark.parametrize("check", encoder_checks.NAMES)
@pytest.mark.parametrize(("family", "tower"), _CASES)
def test_encoder(outcomes: Outcomes, family: FamilyName, tower: str, check: str) -> None:
    outcome = outcomes(family, tower)[check]
    assert not outcome, outcome


@pytest.mark.sglang
@pytest.mark.parametrize(
    "family",
    [
        pytest.param("qwen2_5_vl", marks=trap("all steps of a video attend to each other")),
    ],
)
def test_videos_in_the_stock_tower(outcomes: Outcomes, family: FamilyName) -> None:
    outcome = outcomes(family, STOCK_SGLANG)["videos"]
    assert not outcome, outcome
