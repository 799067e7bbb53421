"""An output's file: its format, and the settings inside its metadata."""

from __future__ import annotations

import json

from millstream_server.media import writing
from millstream_server.media.frames import Frames
from millstream_server.synthesis.request import DiffusionRequest, DiffusionSettings, FileFormat

KEYWORD = "millstream"
"""PNG: the iTXt chunk with the settings, as JSON. WebP has them in EXIF's ImageDescription, MP4 in
the comment."""
EXTENSIONS = {FileFormat.PNG: "png", FileFormat.WEBP: "webp", FileFormat.MP4: "mp4"}


def write_file(
    frames: Frames, request: DiffusionRequest, settings: DiffusionSettings, output: int
) -> bytes:
    """Return the file of the ``output``-th output. It takes time: call it in a thread."""
    about = settings_text(request, settings, output)
    match request.format:
        case FileFormat.PNG:
            return writing.png(frames, request.prompt, {KEYWORD: about})
        case FileFormat.WEBP:
            return writing.webp(frames, about)
        case FileFormat.MP4:
            return writing.mp4(frames, settings.fps, request.prompt, about)


def settings_text(request: DiffusionRequest, settings: DiffusionSettings, output: int) -> str:
    """Return what an output was made with, as JSON in ASCII; ``seed`` is the output's own."""
    about: dict[str, str | int | float | None] = {
        "model": settings.model,
        "prompt": request.prompt,
        "negative_prompt": request.negative_prompt or None,
        "width": settings.width,
        "height": settings.height,
        "steps": settings.steps,
        "guidance_scale": settings.guidance_scale,
        "seed": settings.seed_of(output),
        "scheduler": settings.scheduler or None,
        "strength": settings.strength,
        "frames": settings.frames or None,
        "fps": settings.fps or None,
    }
    return json.dumps({name: value for name, value in about.items() if value is not None})
