"""What the fork servers of tests import: what those of `millstream up` do, and services alone."""

from __future__ import annotations

import importlib
import os
import warnings
from dataclasses import replace

from millstream_server.engines.sglang import preload as sglang
from millstream_server.engines.vllm import preload as vllm
from millstream_server.runtime.forking.preload import Preload
from millstream_server.runtime.forking.spawning import fork_instead_of_spawning

PRELOAD_VARIABLE = "TEST_PRELOAD"
"""In a job's environment: further modules for it and the processes that its engine starts."""

NESTED_VARIABLE = "TEST_NESTED"
"""In a job's environment, with any value: the processes that SGLang starts will start others, as
its controller of data-parallel ranks does; those are forked, too."""


def _in_sglang_service() -> None:
    sglang.PRELOAD.in_service()
    for name in os.environ.get(PRELOAD_VARIABLE, "").split():
        importlib.import_module(name)


def _in_sglang_spawned() -> None:
    sglang.in_spawned()
    if os.environ.pop(NESTED_VARIABLE, ""):
        fork_instead_of_spawning(_in_sglang_spawned)


SERVICES = Preload(
    modules=(
        "millstream_server.cli.chat",
        "millstream_server.cli.main",
        "millstream_server.decode.app",
        "millstream_server.engines.simulated.engine",
        "millstream_server.processor.app",
        "millstream_server.processor.settings",
        "millstream_server.worker.app",
        "transformers",  # else a Processor would start a process that imports it
    )
)
SGLANG = replace(sglang.PRELOAD, in_service=_in_sglang_service, in_spawned=_in_sglang_spawned)
VLLM = vllm.PRELOAD


def fork_engine_processes(preload: Preload) -> None:
    """Import in this interpreter what an engine's processes need; let them be forked from it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a pytest makes them errors, and the copy keeps that
        preload.load()
        if preload.in_spawned is not None:
            fork_instead_of_spawning(preload.in_spawned)
