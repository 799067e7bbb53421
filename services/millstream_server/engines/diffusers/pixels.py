"""Pixels as pipelines have them, and as `Frames`."""

from __future__ import annotations

from typing import Any

import numpy as np

from millstream_server.media.items import Frames, Modality
from millstream_server.runtime.errors import InternalError


def to_frames(pixels: Any, modality: Modality) -> Frames:
    """Round [frames, height, width, 3] of floats from 0 to 1 as diffusers does for PIL.

    Raises:
        InternalError: some are not numbers.
    """
    if not np.isfinite(pixels).all():
        raise InternalError("The model made values that are not numbers; try another dtype.")
    rounded = (pixels * 255).round().astype(np.uint8)
    count, height, width, _ = rounded.shape
    return Frames(
        modality=modality,
        width=width,
        height=height,
        data=memoryview(rounded.tobytes()),
        count=count,
        total_frames=count,
        indices=tuple(range(count)),
    )


def from_frame(frame: Frames) -> Any:
    """Return one RGB frame as [1, height, width, 3] of float32 from 0 to 1."""
    pixels = np.frombuffer(frame.data, np.uint8).reshape(1, frame.height, frame.width, 3)
    return pixels.astype(np.float32) / 255.0
