"""A diffusion worker that makes text: its settings and its process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from millstream_server.control.engine import Role
from millstream_server.engines.adapter import DllmSettings
from millstream_server.engines.registry import TEXT_DIFFUSERS, Engines, TextDiffuserName
from millstream_server.generation.generator import GeneratorEngine
from millstream_server.generation.worker import app
from millstream_server.generation.worker.servicer import DIFFUSION
from millstream_server.generation.worker.settings import WorkerSettings
from millstream_server.runtime.settings import group, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class TextDiffusionSettings(WorkerSettings):
    """Read by `python -m millstream_server.diffusion --kind text`."""

    ENGINES: ClassVar[Engines[GeneratorEngine]] = TEXT_DIFFUSERS

    engine: TextDiffuserName = setting("sglang", help=f"one of {', '.join(TEXT_DIFFUSERS.names)}")
    own: Any = group(TEXT_DIFFUSERS.own_settings)
    dllm: DllmSettings = group(DllmSettings)


async def run(settings: TextDiffusionSettings) -> int:
    """Run a worker that makes text by diffusion; return the process's exit code."""
    return await app.run(settings, Role.DIFFUSION, DIFFUSION, dllm=settings.dllm)
