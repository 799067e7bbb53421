"""The settings of SGLang's diffusion engine, and its configuration made from them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from millstream_server.engines.sglang.diffusion.config import INDEX, SglangDiffuserConfig
from millstream_server.model_files.state import expect_weights
from millstream_server.runtime.settings import SettingsError, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangDiffusionSettings:
    """Settings that only SGLang's diffusion engine reads."""

    model_id: str = setting(
        "",
        help="sglang: published name of the model, as Z-Image-Turbo; empty: by the folder's name "
        "or the pipeline's class",
    )
    num_gpus: int = setting(1, help="sglang: GPUs that one output is spread over")
    cancel_timeout_s: float = setting(
        10.0,
        help="sglang: an engine that goes on so long after a cancel is killed and started again; "
        "at least three times its longest step",
    )
    engine_args: str = setting("", help="sglang: further ServerArgs, as a JSON object")
    engine_log_level: str = setting("warning", help="sglang: its log level")


def diffuser_config(
    settings: SglangDiffusionSettings,
    model_path: Path | None,
    *,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    warm_up_timeout_s: float = 300.0,
) -> SglangDiffuserConfig:
    """Make the configuration of one engine.

    Raises:
        SettingsError: the settings contradict each other.
    """
    if model_path is None:
        raise SettingsError("--model-path is required with SGLang: a pipeline's folder")
    expect_weights(model_path)
    if not (model_path / INDEX).is_file():
        raise SettingsError(f"--model-path {model_path}: there is no {INDEX} in it")
    if settings.num_gpus < 1:
        raise SettingsError(f"--num-gpus is {settings.num_gpus}, not 1 or more")
    if settings.cancel_timeout_s <= 0:
        raise SettingsError(f"--cancel-timeout-s is {settings.cancel_timeout_s:g}, not above 0")
    return SglangDiffuserConfig(
        model_path=model_path,
        model_id=settings.model_id,
        device=device,
        num_gpus=settings.num_gpus,
        warm_up_timeout_s=warm_up_timeout_s,
        cancel_timeout_s=settings.cancel_timeout_s,
        extra=_extra(settings.engine_args),
        log_level=settings.engine_log_level,
    )


def _extra(text: str) -> dict[str, Any]:
    try:
        extra = json.loads(text or "{}")
    except ValueError as error:
        raise SettingsError(f"--engine-args is not a JSON object: {error}") from error
    if not isinstance(extra, dict):
        raise SettingsError("--engine-args is not a JSON object")
    return extra
