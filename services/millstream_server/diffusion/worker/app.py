"""The process of a diffusion worker that makes images or videos, and its settings."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

from millstream_server.control.engine import Role
from millstream_server.diffusion.diffuser import Diffuser
from millstream_server.diffusion.request import Kind
from millstream_server.diffusion.worker.engine import (
    DiffusionLimits,
    DiffusionOptions,
    HostedDiffuser,
)
from millstream_server.diffusion.worker.files import Storage
from millstream_server.diffusion.worker.launch import KindSettings
from millstream_server.diffusion.worker.servicer import make_plan
from millstream_server.engines.adapter import DiffuserEngineSettings
from millstream_server.engines.registry import DIFFUSERS, DiffuserName
from millstream_server.runtime.settings import SettingsError, group, setting
from millstream_server.worker import app
from millstream_server.worker.host_settings import ModelSettings

_STORAGE_TIMEOUT_S = 60.0
"""To write an output: a video of 100 MB at 2 MB/s; then the storage hangs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffusionWorkerSettings(DiffusionLimits):
    """Limits, the queue, storage."""

    max_open_pixel_steps: int = setting(
        0,
        help="most pixels x frames x steps x outputs of all open requests; 0: as many as 64 "
        "requests have that set nothing",
    )
    storage_url: str = setting(
        "",
        help="where outputs are written that are delivered as URLs: any fsspec URL, such as "
        "s3://bucket/folder or file:///folder; empty: such requests are refused",
    )
    storage_public_url: str = setting(
        "", help="URL under which callers find what is in --storage-url; empty: --storage-url"
    )

    def hosted(self, diffuser: Diffuser, kind: Kind) -> HostedDiffuser:
        """Make a hosted engine; nothing is loaded yet.

        Raises:
            SettingsError: a number that must be at least 1 is 0, or the storage can't be used.
        """
        for name in ("requests_at_once", "max_outputs"):
            if getattr(self, name) < 1:
                raise SettingsError(f"--{name.replace('_', '-')}: must be at least 1")
        if bool(self.default_width) != bool(self.default_height):
            raise SettingsError("--default-width and --default-height: set both or neither")
        if self.storage_public_url and not self.storage_url:
            raise SettingsError("--storage-public-url needs --storage-url")
        limits = {field.name: getattr(self, field.name) for field in fields(DiffusionLimits)}
        storage: Storage | None = None
        if self.storage_url:
            storage = Storage(self.storage_url, self.storage_public_url, _STORAGE_TIMEOUT_S)
        return HostedDiffuser(diffuser, DiffusionOptions(kind=kind, storage=storage, **limits))


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
        return DIFFUSERS.checked(self)


async def run(settings: MediaDiffusionSettings) -> int:
    """Run a worker that makes images or videos; return the process's exit code."""
    kind = Kind(settings.what.kind.value)
    diffuser = DIFFUSERS.make(settings, Role.DIFFUSION, kind=kind)
    plan = make_plan(
        settings.worker.hosted(diffuser, kind),
        settings.served_name,
        max_open_pixel_steps=settings.worker.max_open_pixel_steps,
    )
    return await app.run(settings, plan)
