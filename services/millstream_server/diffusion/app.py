"""The process of a diffusion worker that makes images or videos."""

from __future__ import annotations

from millstream_server.diffusion.settings import DiffusionSettings
from millstream_server.synthesis.request import Kind
from millstream_server.worker import app
from millstream_server.worker.diffusion.servicer import make_plan
from millstream_server.worker.diffusion.settings import make_diffuser


async def run(settings: DiffusionSettings) -> int:
    """Run a worker that makes images or videos; return the process's exit code.

    Raises:
        SettingsError: settings contradict each other.
    """
    kind = Kind(settings.what.kind.value)
    diffuser = make_diffuser(settings.diffuser, kind, settings.model_path)
    plan = make_plan(
        settings.worker.hosted(diffuser, kind),
        settings.served_name,
        max_open_pixel_steps=settings.worker.max_open_pixel_steps,
    )
    return await app.run(settings, plan)
