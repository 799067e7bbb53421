# ruff: noqa: INP001 - a folder for PYTHONPATH, not a package
"""Python runs this at the start of every process that has this folder on PYTHONPATH.

It lets torchvision be imported next to a CPU build of PyTorch, mends vLLM there, then runs the
`sitecustomize` that it shadows, if there is one.
"""

from __future__ import annotations

import os
from pathlib import Path

from millstream_server.engines.torch_on_cpu import (
    declare_when_torchvision_is_imported,
    run_shadowed_sitecustomize,
)
from millstream_server.engines.vllm import worker_on_cpu

declare_when_torchvision_is_imported()
worker_on_cpu.install()
run_shadowed_sitecustomize(Path(__file__).resolve().parent)
# vLLM's core process has no threads of ours: it may fork its workers, which is vLLM's default and
# saves each of them the import of vLLM.
os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
