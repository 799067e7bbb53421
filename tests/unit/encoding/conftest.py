"""For every test of this folder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from unittest import mock

import pytest


@pytest.fixture(autouse=True)
def _environment_kept() -> Iterator[None]:
    """What `engines.torch_on_cpu` sets is not for the processes that other tests start."""
    with mock.patch.dict(os.environ):
        yield
