"""Vectors as they are sent: cut, of length 1, packed."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def finish(
    rows: NDArray[np.float32], dimensions: int | None, *, normalize: bool
) -> NDArray[np.float32]:
    """Cut vectors [inputs, width] to ``dimensions``, None: not; give them the length 1 after that.

    A vector of zeros stays one.
    """
    cut = rows if dimensions is None else rows[:, :dimensions]
    if not normalize:
        return cut
    lengths: NDArray[np.float32] = np.sqrt(np.einsum("ij,ij->i", cut, cut))
    lengths[lengths == 0] = 1
    return cut / lengths[:, np.newaxis]


def pack(rows: NDArray[np.float32]) -> bytes:
    """Return the numbers, one vector after another: float32, little endian."""
    return np.ascontiguousarray(rows, "<f4").tobytes()
