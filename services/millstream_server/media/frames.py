"""Decoded media."""

from __future__ import annotations

from dataclasses import dataclass

from millstream_server.media.items import Modality


@dataclass(frozen=True, slots=True, kw_only=True)
class Frames:
    """A decoded image or video: RGB, 8 bits, upright."""

    modality: Modality
    width: int
    height: int
    data: memoryview
    """[frames, height, width, 3] bytes; an image has one frame."""
    count: int = 1
    fps: float = 0.0
    """Video: frames per second of the file."""
    total_frames: int = 1
    """Video: frames in the file."""
    indices: tuple[int, ...] = (0,)
    """Video: which of the file's frames these are."""
