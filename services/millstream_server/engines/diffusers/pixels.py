"""Pixels as pipelines have them, as `Frames`, and decoded from latents for previews.

Latents are decoded as the pipelines do it at the end. Two layouts are known: [1, channels, height,
width] with a scale and a shift (Z-Image, Stable Diffusion), and [1, channels, frames, height,
width] with a mean and a deviation for each channel (Wan). Other pipelines get no previews.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np

from millstream_server.media.items import Frames, Modality
from millstream_server.runtime.errors import InternalError

_IMAGE_AXES = 4
_VIDEO_AXES = 5


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


def preview(pipe: Any, latents: Any) -> Frames | None:
    """Decode the latents of an image, or of a video's first frame; None: unknown layout."""
    unscale = _LAYOUTS.get((latents.dim(), type(pipe.vae).__name__))
    if unscale is None:
        return None
    torch: Any = importlib.import_module("torch")
    with torch.no_grad():
        ready = unscale(pipe.vae.config, latents.to(pipe.vae.dtype))
        decoded = pipe.vae.decode(ready, return_dict=False)[0]
    if decoded.dim() == _VIDEO_AXES:
        decoded = decoded[:, :, 0]
        return to_frames(pipe.video_processor.postprocess(decoded, "np"), Modality.IMAGE)
    return to_frames(pipe.image_processor.postprocess(decoded, "np"), Modality.IMAGE)


def _image(config: Any, latents: Any) -> Any:
    return latents / config.scaling_factor + (config.shift_factor or 0.0)


def _first_frame(config: Any, latents: Any) -> Any:
    mean = latents.new_tensor(config.latents_mean).view(1, -1, 1, 1, 1)
    deviation = latents.new_tensor(config.latents_std).view(1, -1, 1, 1, 1)
    return latents[:, :, :1] * deviation + mean


_LAYOUTS: dict[tuple[int, str], Callable[[Any, Any], Any]] = {
    (_IMAGE_AXES, "AutoencoderKL"): _image,
    (_VIDEO_AXES, "AutoencoderKLWan"): _first_frame,
}
