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


_PLACES = ("in the Processor", "on its own")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run the tests in both places; those of pages, which ask little of the API, in the first."""
    pages = metafunc.module.__name__.endswith("_page")
    metafunc.parametrize("place", _PLACES[:1] if pages else _PLACES, indirect=True)


@pytest.fixture(autouse=True)
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "on its own":
        monkeypatch.setattr(in_process, "in_front", _door)
