"""What vLLM's core process runs before vLLM: it ends with the worker's process, however that ends.

vLLM's core doesn't look whether its client lives: killed, a worker would leave it behind, with the
model's memory and the ports of hand-offs.
"""

from __future__ import annotations

import ctypes
import importlib
import multiprocessing
import os
import signal
import sys
import traceback
from typing import Any

_CORE = "vllm.v1.engine.core"
_NIXL = "vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_scheduler"
_QUEUES = "vllm.distributed.device_communicators.shm_broadcast"
_RECHECK_MS = 20
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
    recheck_queues()
    _ignore_late_transfers()
    if kwargs["vllm_config"].kv_transfer_config is not None:
        _end_without_side_channel()
    module: Any = importlib.import_module(_CORE)
    module.EngineCoreProc.run_engine_core(*args, **kwargs)


def recheck_queues() -> None:
    """Let who waits for a message between core and workers look for it itself, often enough.

    Behind a pause of a second vLLM's readers sleep until they are told of a message, by a socket
    that may drop that, and look again only after five seconds: on a busy machine the first hand-off
    took that long, or a multiple, up to its failure. Forked workers inherit this.
    """
    queues: Any = importlib.import_module(_QUEUES)
    if not hasattr(queues, "SHM_READER_RECHECK_INTERVAL_MS"):
        raise RuntimeError("vLLM's message queues have changed: look at how their readers wait.")
    queues.SHM_READER_RECHECK_INTERVAL_MS = _RECHECK_MS


def _end_without_side_channel() -> None:
    """End the core if its side channel's port can't be bound: it would wait for it for ever."""
    scheduler: Any = importlib.import_module(_NIXL).NixlBaseConnectorScheduler
    listen = scheduler._nixl_handshake_listener  # noqa: SLF001 - no public one

    def listen_or_end(*args: Any) -> None:
        try:
            listen(*args)
        except Exception:  # noqa: BLE001 - of the vendor, in a thread that nobody joins
            traceback.print_exc()
            os._exit(1)

    scheduler._nixl_handshake_listener = staticmethod(listen_or_end)  # noqa: SLF001


def _ignore_late_transfers() -> None:
    """Let the core live when a transfer ends whose request is gone, as after a cancel.

    Its scheduler asserts that it knows the request. A withdrawal can't see whether it still does:
    the scheduler and the end of transfers are in different processes.
    """
    scheduler: Any = importlib.import_module("vllm.v1.core.sched.scheduler").Scheduler
    take = scheduler._update_from_kv_xfer_finished  # noqa: SLF001 - no public one

    def take_known(self: Any, output: Any) -> None:
        if output.finished_recving:
            output.finished_recving = {
                core_id for core_id in output.finished_recving if core_id in self.requests
            }
        take(self, output)

    scheduler._update_from_kv_xfer_finished = take_known  # noqa: SLF001
