"""Vectors are cut, then get the length 1, and are packed."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from millstream_server.embedding.request import Ranked
from millstream_server.embedding.worker.core import finish, pack

ROWS = np.array([[3, 4, 12], [0, 0, 5], [0, 0, 0]], np.float32)


@pytest.mark.parametrize(
    ("dimensions", "normalize", "expected"),
    [
        (None, False, [[3, 4, 12], [0, 0, 5], [0, 0, 0]]),
        (2, False, [[3, 4], [0, 0], [0, 0]]),
        (2, True, [[0.6, 0.8], [0, 0], [0, 0]]),
        (None, True, [[3 / 13, 4 / 13, 12 / 13], [0, 0, 1], [0, 0, 0]]),
    ],
)
def test_finish(dimensions: int | None, normalize: bool, expected: list[list[float]]) -> None:  # noqa: FBT001 - a parameter
    made = finish(ROWS, dimensions, normalize=normalize)
    assert made.dtype == np.float32
    np.testing.assert_allclose(made, expected, rtol=1e-7)
    assert ROWS[0, 0] == 3


def test_pack_writes_one_vector_after_another() -> None:
    assert pack(ROWS[:2, :2]) == struct.pack("<4f", 3, 4, 0, 0)
    assert pack(ROWS[:, 1:].astype(">f4")) == struct.pack("<6f", 4, 12, 0, 5, 0, 0)


@pytest.mark.parametrize(("logit", "score"), [(0.0, 0.5), (1e6, 1.0), (-1e6, 0.0)])
def test_scores_of_extreme_logits(logit: float, score: float) -> None:
    assert Ranked(0, logit).score == score
