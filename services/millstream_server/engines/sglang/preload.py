"""What processes on SGLang need, for a fork server; on a CPU only."""

from __future__ import annotations

import importlib
import os
from typing import Any

from millstream_server.engines.sglang import cpu, dllm
from millstream_server.engines.torch_on_cpu import put_on_path
from millstream_server.runtime.forking.preload import Preload


def _after() -> None:
    cpu.patch_sglang()
    # It looks for the title's place now, and could not once the environment is changed.
    importlib.import_module("setproctitle").getproctitle()


def _in_service() -> None:
    put_on_path(cpu.ON_PATH)  # the environment is the job's now
    cpu.activate()


def in_spawned() -> None:
    """Let SGLang's modules read what they read when they are imported, which was long ago."""
    values: Any = importlib.import_module("prometheus_client.values")
    values.ValueClass = values.get_value_class()
    (variable,) = dllm.ENVIRONMENT
    if (tokens := os.environ.get(variable)) is not None:
        policy: Any = importlib.import_module("sglang.srt.managers.schedule_policy")
        policy.CLIP_MAX_NEW_TOKENS = int(tokens)


PRELOAD = Preload(
    modules=(
        "millstream_server.decode.app",
        "millstream_server.engines.sglang.engine",
        "millstream_server.generation.worker.app",
        "millstream_server.runtime.lifecycle.main",
        "millstream_server.worker.app",
        "sglang.srt.entrypoints.engine",
        "sglang.srt.managers.detokenizer_manager",
        "sglang.srt.managers.scheduler",
        "sglang.srt.models.registry",  # imports the modules of all models, as each scheduler would
    ),
    before=cpu.activate,
    after=_after,
    in_service=_in_service,
    in_spawned=in_spawned,
)
