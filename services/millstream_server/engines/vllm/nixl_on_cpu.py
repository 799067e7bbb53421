"""What vLLM's NIXL connectors need in a worker process without a GPU."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from millstream_server.engines.torch_on_cpu import calm_nixl

_WORKER = ".kv_connector.v1.nixl.base_worker"


class _WhenNixlIsUsed(MetaPathFinder):
    """Finds nothing; it prepares for the module that makes vLLM's NIXL agent."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.endswith(_WORKER):
            calm_nixl()
            _keep_all_cores()
        return None


def _keep_all_cores() -> None:
    """Keep vLLM from binding the whole process to the last core of each NUMA node.

    It means to reserve that core for transfers. But the model runs in the same process, and so
    prefill, decode and all else that is on the machine share one core: on a busy one a worker
    doesn't get a step done in a minute. The topology is asked for this only.
    """
    platform: Any = importlib.import_module("vllm.platforms.cpu").CpuPlatform
    if not hasattr(platform, "discover_numa_topology"):
        message = "vLLM's CpuPlatform has no discover_numa_topology: look at its NIXL worker again."
        raise RuntimeError(message)
    platform.discover_numa_topology = classmethod(lambda _cls: [])


def install() -> None:
    """Prepare once NIXL is used here; for processes that may never."""
    sys.meta_path.insert(0, _WhenNixlIsUsed())
