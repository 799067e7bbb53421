"""One live suite for the example clients of all languages."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.clients.client_examples import ExampleSuite


@pytest.fixture(scope="session")
def example_suite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ExampleSuite]:
    """Start it with the first example; `tests.support.clients.client_examples` says what it has."""
    suite = ExampleSuite(tmp_path_factory.mktemp("clients"))
    with suite.running():
        yield suite
