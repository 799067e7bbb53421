"""What the adapter of diffusers is started with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

INDEX = "model_index.json"
"""The file that makes a folder a pipeline's."""

Device = Literal["auto", "cpu", "cuda"]
ElementChoice = Literal["auto", "float32", "bfloat16", "float16"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffusersConfig:
    """Settings of an engine."""

    model_path: Path
    """Folder of a pipeline: `INDEX`, and a folder for each part."""
    device: Device = "auto"
    """"auto" uses the GPU where there is one."""
    dtype: ElementChoice = "auto"
    """Type of the weights; "auto" is bfloat16 on a GPU and float32 on the CPU. The VAE of a Wan
    pipeline is always float32: half the precision shows in its videos."""
    warm_up_timeout_s: float = 300.0
