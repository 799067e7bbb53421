"""What vLLM's core process runs before vLLM: it ends with the worker's process, however that ends.

vLLM's core doesn't look whether its client lives: killed, a worker would leave it behind, with the
model's memory and the ports of hand-offs.
"""

from __future__ import annotations

import ctypes
import importlib
import multiprocessing
import signal
import sys
from typing import Any

_CORE = "vllm.v1.engine.core"
_PR_SET_PDEATHSIG = 1


def install() -> None:
    """Let the core processes that are started from now on begin with `run`."""
    module: Any = importlib.import_module(_CORE)
    module.EngineCoreProc.run_engine_core = staticmethod(run)


def run(*args: Any, **kwargs: Any) -> None:
    """Be a core process, until the end of the thread that started it.

    That is one of the event loop's pool, whose threads live as long as the loop. vLLM's worker
    processes end when the core does.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        parent = multiprocessing.parent_process()
        if parent is None or not parent.is_alive():  # it had ended before the request
            sys.exit(1)
    module: Any = importlib.import_module(_CORE)
    module.EngineCoreProc.run_engine_core(*args, **kwargs)
