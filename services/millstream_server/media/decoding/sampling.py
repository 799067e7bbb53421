"""Which frames of a video a model sees: as its own processor in transformers chooses.

Models are trained with one rule, and which frames they get decides their output, so both are
computed to the last rounding. No torch, no numpy: decoder processes import this.
"""

from __future__ import annotations

import enum
import math
import struct

MIN_FRAMES = 4
"""Fewest frames, if the video has them; in both rules."""
_EVEN = 2


class FrameSampling(enum.Enum):
    """A rule; the values are the functions by which the models' processors compute it."""

    LINSPACE = "linspace"
    """From the first frame to the last one: Qwen3-VL."""
    ARANGE = "arange"
    """The first frame of equal parts, an even number of them: Qwen2-VL, Qwen2.5-VL."""


def sample(
    rule: FrameSampling, total: int, video_fps: float, *, fps: float, max_frames: int
) -> tuple[int, ...]:
    """Return the indices of the frames, ascending, of a video with ``total`` >= 1 frames."""
    if rule is FrameSampling.LINSPACE:
        return _linspace(total, video_fps, fps, max_frames)
    return _arange(total, video_fps, fps, max_frames)


def _linspace(total: int, video_fps: float, fps: float, max_frames: int) -> tuple[int, ...]:
    count = min(max(int(total / video_fps * fps), MIN_FRAMES), max_frames, total)
    if count == 1:
        return (0,)
    step = (total - 1) / (count - 1)
    return (*(round(i * step) for i in range(count - 1)), total - 1)


def _arange(total: int, video_fps: float, fps: float, max_frames: int) -> tuple[int, ...]:
    most = min(max_frames, total) // _EVEN * _EVEN
    count = math.floor(min(max(total / video_fps * fps, MIN_FRAMES), most) / _EVEN) * _EVEN
    if count == 0:  # one frame; transformers fails here
        return (0,)
    step = total / count
    return tuple(int(_float32(i * step)) for i in range(math.ceil(total / step)))


def _float32(value: float) -> float:
    """Round as torch does, which computes these in float32."""
    (rounded,) = struct.unpack("f", struct.pack("f", value))
    return float(rounded)
