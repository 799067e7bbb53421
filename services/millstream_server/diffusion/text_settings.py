"""Settings of a diffusion worker that makes text."""

from __future__ import annotations

from dataclasses import dataclass

from millstream_server.engines.settings import DllmSettings
from millstream_server.runtime.settings import group
from millstream_server.worker.settings import WorkerSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class TextDiffusionSettings(WorkerSettings):
    """Read by `python -m millstream_server.diffusion --kind text`."""

    dllm: DllmSettings = group(DllmSettings)
