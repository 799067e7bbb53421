"""Which transport a contract test's servers have."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.wire import transports


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run the tests marked `both_transports` on each of them; the others run on the default."""
    if metafunc.definition.get_closest_marker("both_transports"):
        metafunc.parametrize("transport", transports.TRANSPORTS, indirect=True)


@pytest.fixture(autouse=True)
def transport(request: pytest.FixtureRequest) -> Iterator[None]:
    with transports.using(getattr(request, "param", transports.TRANSPORTS[0])):
        yield
