"""The process of a diffusion worker that makes images or videos, and its settings."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from millstream_server.control.engine import Role
from millstream_server.diffusion.request import Kind
from millstream_server.diffusion.worker.launch import KindSettings
from millstream_server.diffusion.worker.servicer import make_plan
from millstream_server.diffusion.worker.settings import DiffusionWorkerSettings
from millstream_server.engines.adapter import DiffuserEngineSettings
from millstream_server.engines.registry import DIFFUSERS, DiffuserName
from millstream_server.runtime.settings import group, setting
from millstream_server.worker import app
from millstream_server.worker.host_settings import ModelSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaDiffusionSettings(ModelSettings):
    """Read by `python -m millstream_server.diffusion`, except with `--kind text`."""

    max_open_requests: int = setting(
        64, help="most requests at once, running and queued; 0: four times --requests-at-once"
    )
    what: KindSettings = group(KindSettings)
    model_path: Path | None = setting(
        None, help="model directory (a pipeline's folder); not needed by the simulated engine"
    )
    engine: DiffuserName = setting("diffusers", help=f"one of {', '.join(DIFFUSERS.names)}")
    common: DiffuserEngineSettings = group(DiffuserEngineSettings)
    own: Any = group(DIFFUSERS.own_settings)
    worker: DiffusionWorkerSettings = group(DiffusionWorkerSettings)

    def checked(self) -> Self:
        """Return the settings with the engine's own arguments read; called once, by `load`.

        Raises:
            SettingsError: one is unknown, wrong, or managed by us, or the engine takes none.
        """
        return DIFFUSERS.checked(self)


async def run(settings: MediaDiffusionSettings) -> int:
    """Run a worker that makes images or videos; return the process's exit code.

    Raises:
        SettingsError: settings contradict each other.
    """
    kind = Kind(settings.what.kind.value)
    diffuser = DIFFUSERS.make(settings, Role.DIFFUSION, kind=kind)
    plan = make_plan(
        settings.worker.hosted(diffuser, kind),
        settings.served_name,
        max_open_pixel_steps=settings.worker.max_open_pixel_steps,
    )
    return await app.run(settings, plan)
