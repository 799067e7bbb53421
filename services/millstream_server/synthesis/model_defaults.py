"""What a model's maker says of its use: `millstream.json` in the folder of a pipeline.

Every key is optional; all values but `guidance_scale` are whole numbers.

| Key | What it is |
|---|---|
| `width`, `height` | size when a request names none |
| `max_pixels` | most width x height |
| `steps` | denoising steps when a request names none |
| `max_steps` | most steps |
| `guidance_scale` | guidance when a request names none, 0 to 100 |
| `max_prompt_tokens` | most tokens of a prompt; longer ones are refused, not cut |
| `frames`, `fps` | videos: frames and frames per second when a request names none |
| `max_frames` | videos: most frames |
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE_NAME = "millstream.json"
MAX_GUIDANCE_SCALE = 100.0


class ModelDefaultsError(ValueError):
    """The file is wrong; the text says where."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDefaults:
    """The file's values; None: it doesn't say."""

    width: int | None = None
    height: int | None = None
    max_pixels: int | None = None
    steps: int | None = None
    max_steps: int | None = None
    guidance_scale: float | None = None
    max_prompt_tokens: int | None = None
    frames: int | None = None
    fps: int | None = None
    max_frames: int | None = None


def read_model_defaults(folder: Path) -> ModelDefaults:
    """Read a pipeline's file; without one every value is None.

    Raises:
        ModelDefaultsError: it isn't JSON, or has an unknown key or a value of the wrong kind.
    """
    file = folder / FILE_NAME
    if not file.is_file():
        return ModelDefaults()
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelDefaultsError(f"{FILE_NAME} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ModelDefaultsError(f"{FILE_NAME} is not a JSON object")
    known = [field.name for field in dataclasses.fields(ModelDefaults)]
    unknown = [key for key in values if key not in known]
    if unknown:
        raise ModelDefaultsError(f"{FILE_NAME}: unknown {unknown}; known are {', '.join(known)}")
    for key, value in values.items():
        _check(key, value)
    if ("width" in values) != ("height" in values):
        raise ModelDefaultsError(f"{FILE_NAME}: width and height go together")
    return ModelDefaults(**values)


def _check(key: str, value: Any) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if key == "guidance_scale":
        if not number or not 0 <= value <= MAX_GUIDANCE_SCALE:
            message = f"{FILE_NAME}: {key} is {value!r}, not a number from 0 to 100"
            raise ModelDefaultsError(message)
    elif not number or not isinstance(value, int) or value < 1:
        raise ModelDefaultsError(f"{FILE_NAME}: {key} is {value!r}, not a whole number above 0")
