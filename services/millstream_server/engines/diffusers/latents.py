"""Decodes latents in the middle of a run, for previews, as the pipelines decode them at the end.

Two layouts are known: [1, channels, height, width] with a scale and a shift (Z-Image, Stable
Diffusion), and [1, channels, frames, height, width] with a mean and a deviation for each channel
(Wan). Other pipelines get no previews.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from millstream_server.engines.diffusers.pixels import to_frames
from millstream_server.media.items import Frames, Modality

_IMAGE_AXES = 4
_VIDEO_AXES = 5


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
