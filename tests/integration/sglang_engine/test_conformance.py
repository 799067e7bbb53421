"""The conformance suite of all engines, on real SGLang, in a pytest of its own."""

from __future__ import annotations

import asyncio
import os
import re
from pathlib import Path

import pytest

from tests.support.engines.engines import MODEL_VARIABLE
from tests.support.processes import forked

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(300)]

_SUITE = "tests/contract/test_engine_conformance.py"


async def test_sglang_passes_the_conformance_suite(model: Path) -> None:
    done = await asyncio.to_thread(
        forked.run,
        "sglang",
        "pytest",
        *("-q", "-rs", "-p", "no:cacheprovider", _SUITE),
        *("-o", "filterwarnings=default", "-W", "default"),  # SGLang's imports warn
        environment={**os.environ, MODEL_VARIABLE: str(model), "OMP_NUM_THREADS": "1"},
    )
    output = done.stdout + done.stderr
    assert done.returncode == 0, done.stdout[-6000:]  # ends with the names of what failed
    (passed,) = re.findall(r"^(\d+) passed", output, re.MULTILINE)
    assert int(passed) >= 15, output
    assert "skipped" not in output
