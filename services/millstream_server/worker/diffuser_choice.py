"""Makes the engine for images and videos from the settings."""

from __future__ import annotations

import enum
import importlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from millstream_server.engines.diffusers import settings as diffusers
from millstream_server.engines.sglang import cpu as sglang_cpu
from millstream_server.engines.sglang.diffusion import settings as sglang
from millstream_server.engines.simulated import settings as simulated
from millstream_server.engines.simulated.diffuser import SimulatedDiffuser
from millstream_server.runtime.settings import group, setting
from millstream_server.runtime.settings.arguments import refuse_arguments
from millstream_server.synthesis.diffuser import Diffuser
from millstream_server.synthesis.request import Kind


class DiffuserKind(enum.Enum):
    """Which engine makes images and videos."""

    DIFFUSERS = "diffusers"
    """A pipeline of diffusers, as a user of the library runs it."""
    SGLANG = "sglang"
    """SGLang's diffusion engine, for the models that it knows."""
    SIMULATED = "simulated"
    """No model: `engines.simulated.diffuser`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffuserSettings:
    """Settings of an engine for images and videos."""

    REMOVED: ClassVar[Mapping[str, str]] = simulated.gone(simulated.SimulatedDiffuserSettings)

    engine: DiffuserKind = setting(
        DiffuserKind.DIFFUSERS, help="what makes images and videos: diffusers, sglang or simulated"
    )
    device: Literal["auto", "cuda", "cpu"] = setting("auto", help="auto, cuda or cpu")
    warm_up_timeout_s: float = setting(300.0, help="longest warm-up before the start fails")
    diffusers: diffusers.DiffusersSettings = group(diffusers.DiffusersSettings)
    sglang: sglang.SglangDiffusionSettings = group(sglang.SglangDiffusionSettings)

    def checked(self) -> Self:
        """Return the settings with the engine's own arguments read.

        Raises:
            SettingsError: one is unknown, wrong, or managed by us, or the engine takes none.
        """
        if self.engine is DiffuserKind.SIMULATED:
            own = simulated.SimulatedDiffuserSettings
            read = simulated.read_simulated(own, self.sglang.engine_args)
            return replace(self, sglang=replace(self.sglang, engine_args=read))
        if self.engine is not DiffuserKind.SGLANG:
            refuse_arguments(self.sglang.engine_args, self.engine.value)
            return self
        return replace(self, sglang=self.sglang.checked(self.device))


def make_diffuser(settings: DiffuserSettings, kind: Kind, model_path: Path | None) -> Diffuser:
    """Make the engine that ``settings`` name; nothing is loaded yet.

    ``kind`` is what the simulated engine makes; the others make what the model in ``model_path``
    does, which `DiffuserInfo.kinds` says.

    Raises:
        SettingsError: the folder is missing, or no pipeline's.
    """
    if settings.engine is DiffuserKind.SIMULATED:
        arguments = simulated.SimulatedDiffuserSettings(**settings.sglang.engine_args.values)
        return SimulatedDiffuser(simulated.diffuser_config(arguments, kind))
    if not sglang_cpu.gpu_present():
        sglang_cpu.activate()  # for torchvision too, which diffusers imports
    common: Any = {"device": settings.device, "warm_up_timeout_s": settings.warm_up_timeout_s}
    # Imported here: a worker needs the vendors of one engine only.
    if settings.engine is DiffuserKind.SGLANG:
        engine: Any = importlib.import_module("millstream_server.engines.sglang.diffuser")
        own = sglang.diffuser_config(settings.sglang, model_path, **common)
        made: Diffuser = engine.SglangDiffuser(own)
        return made
    from millstream_server.engines.diffusers.engine import DiffusersEngine  # noqa: PLC0415

    config = diffusers.diffuser_config(settings.diffusers, model_path, **common)
    return DiffusersEngine(config)
