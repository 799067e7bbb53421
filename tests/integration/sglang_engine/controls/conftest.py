"""One engine, and three versions of its weights, for all operations."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.support.engines.engine_process import EngineProcess
from tests.support.models.checkpoints import changed, save


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def engine(
    model: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[EngineProcess]:
    engine = await EngineProcess.launch(
        tmp_path_factory.mktemp("controls") / "log", model_path=str(model), max_running_requests=4
    )
    await engine.ready()
    yield engine
    assert await engine.close() == 0


@pytest.fixture(scope="package")
def versions(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("versions")
    return {
        "base": model,
        "A": save(model, folder / "A", changed(model, 1)),
        "B": save(model, folder / "B", changed(model, 2), shards=3),
    }
