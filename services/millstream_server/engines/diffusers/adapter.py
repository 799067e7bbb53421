"""Images and videos with pipelines of diffusers: what the adapter is started with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from millstream_server.diffusion.diffuser import Diffuser
from millstream_server.engines.adapter import (
    Adapter,
    Device,
    DiffuserEngineSettings,
    ElementChoice,
    EngineContext,
    Offer,
    model_folder,
)
from millstream_server.runtime.settings import setting

INDEX = "model_index.json"
"""The file that makes a folder a pipeline's."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffusersSettings:
    """Settings that only diffusers reads."""

    dtype: ElementChoice = setting(
        "auto",
        help="diffusers: type of the weights; auto: bfloat16 on a GPU, float32 on a CPU; Wan's VAE "
        "is always float32",
    )


def _diffuser(own: DiffusersSettings, context: EngineContext) -> Diffuser:
    from millstream_server.engines.diffusers.engine import DiffusersEngine  # noqa: PLC0415

    common: DiffuserEngineSettings = context.common
    config = DiffusersConfig(
        model_path=model_folder(context.model_path, "diffusers", "a pipeline's folder", INDEX),
        device=common.device,
        dtype=own.dtype,
        warm_up_timeout_s=common.warm_up_timeout_s,
    )
    return DiffusersEngine(config)


ADAPTER = Adapter(
    name="diffusers",
    packages=("torch", "diffusers"),
    diffuser=Offer(settings=DiffusersSettings, make=_diffuser),
)
