"""What processes on vLLM need, for a fork server; on a CPU only."""

from __future__ import annotations

import importlib
import os

from millstream_server.engines import torch_on_cpu
from millstream_server.engines.vllm import worker_on_cpu
from millstream_server.runtime.forking.preload import Preload


def _before() -> None:
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # read when PyTorch is imported
    torch_on_cpu.prepare()
    worker_on_cpu.install()


def _after() -> None:
    # It looks for the title's place now, and could not once the environment is changed.
    importlib.import_module("setproctitle").getproctitle()


def _in_spawned() -> None:
    if "VLLM_WORKER_MULTIPROC_METHOD" in os.environ:  # as `on_path/sitecustomize` does
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"


PRELOAD = Preload(
    modules=(
        "millstream_server.decode.app",
        "millstream_server.engines.vllm.engine",
        "millstream_server.generation.worker.app",
        "millstream_server.runtime.lifecycle.main",
        "millstream_server.worker.app",
        "vllm.engine.arg_utils",
        "vllm.v1.engine.core_client",
        "vllm.v1.worker.cpu_worker",
        "vllm.model_executor.models.llama",
    ),
    before=_before,
    after=_after,
    in_spawned=_in_spawned,
)
