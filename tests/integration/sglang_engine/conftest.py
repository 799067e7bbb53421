"""The model that all of these engines run, and what a bare `sgl.Engine` answers with it.

Every engine runs in a process of its own (`engines.engine_process`), so nothing of SGLang is
imported here. Class-scoped fixtures keep at most two engines alive at a time.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import pytest_asyncio

from tests.support.engines.sglang_requests import (
    PROMPTS,
    child,
)
from tests.support.models.dllm_models import make_random_dllm
from tests.support.models.models import make_random_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def dllm_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_dllm(tmp_path_factory.mktemp("dllm") / "sdar")


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def expected(model: Path) -> list[list[int]]:
    """What a bare `sgl.Engine` answers to `PROMPTS`."""
    answers: list[list[int]] = await child(
        "tests.support.engines.bare_sglang", "generate", str(model), json.dumps(PROMPTS)
    )
    return answers
