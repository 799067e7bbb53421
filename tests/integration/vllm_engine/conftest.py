"""The model that all of these engines run, and what transformers answers with it."""

from __future__ import annotations

from pathlib import Path

import pytest
import pytest_asyncio

from tests.support.engines.vllm_engines import NEW_TOKENS, PROMPTS, reference
from tests.support.models.models import make_random_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_model(tmp_path_factory.mktemp("model"), heads=2)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def expected(model: Path) -> list[list[int]]:
    """What transformers answers to `PROMPTS`."""
    return await reference(model, PROMPTS, NEW_TOKENS)
