"""Where the HTTP API's endpoints run: in the Processor, and in a door of their own."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import pytest

from millstream_server.runtime.telemetry.tracing import Tracing
from millstream_testing import in_process
from tests.support.processor.door import door


@contextlib.asynccontextmanager
async def _door(processor: str, tracing: Tracing | None) -> AsyncIterator[int]:
    async with door(processor, serving=False, tracing=tracing) as served:
        yield served.port


@pytest.fixture(autouse=True, params=["in the Processor", "on its own"])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "on its own":
        monkeypatch.setattr(in_process, "in_front", _door)
