"""Limits on one image or video, checked before it is decoded."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaLimits:
    """What is refused with a sentence. Sizes come from the file's header, before decoding."""

    max_item_bytes: int = 64 << 20
    """Most bytes of a file."""
    max_pixels: int = 36_000_000
    """Most pixels of an image, or of a video's frame: width x height."""
    max_frames: int = 128
    """Most frames that are read of a video; a longer one is sampled evenly."""
    max_video_frames: int = 20_000
    """Most frames that a video may have."""
    max_video_s: float = 600.0
    """Longest video."""
    fps: float = 2.0
    """Frames read per second of video, as the models were trained."""
    max_decoded_bytes: int = 1 << 30
    """Most bytes of the frames that are read of a file: width x height x 3 for each."""
    decode_timeout_s: float = 20.0
    """A decoder that takes longer is killed."""
    decode_memory_bytes: int = 2 << 30
    """Address space of a decoder process."""
