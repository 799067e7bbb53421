"""The settings of the adapter of diffusers, and its configuration made from them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from millstream_server.engines.diffusers.config import INDEX, DiffusersConfig
from millstream_server.model_files.state import expect_weights
from millstream_server.runtime.settings import SettingsError, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffusersSettings:
    """Settings that only diffusers reads."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = setting(
        "auto",
        help="diffusers: type of the weights; auto: bfloat16 on a GPU, float32 on a CPU; Wan's VAE "
        "is always float32",
    )


def diffuser_config(
    settings: DiffusersSettings,
    model_path: Path | None,
    *,
    device: Literal["auto", "cuda", "cpu"] = "auto",
    warm_up_timeout_s: float = 300.0,
) -> DiffusersConfig:
    """Make the configuration of one engine.

    Raises:
        SettingsError: the folder is missing, or no pipeline's.
    """
    if model_path is None:
        raise SettingsError("--model-path is required with --engine diffusers: a pipeline's folder")
    expect_weights(model_path)
    if not (model_path / INDEX).is_file():
        raise SettingsError(f"--model-path {model_path}: there is no {INDEX} in it")
    return DiffusersConfig(
        model_path=model_path,
        device=device,
        dtype=settings.dtype,
        warm_up_timeout_s=warm_up_timeout_s,
    )
