"""What vLLM needs in its worker processes without a GPU."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from millstream_server.engines.torch_on_cpu import calm_nixl

_NIXL = ".kv_connector.v1.nixl.base_worker"
_RUNNER = "vllm.v1.worker.cpu_model_runner"


class _WhenUsed(MetaPathFinder):
    """Finds nothing; it prepares for what is about to be imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.endswith(_NIXL):  # it makes vLLM's NIXL agent
            calm_nixl()
            _keep_all_cores()
        elif fullname == _RUNNER:
            _draw_for_whole_prompts()
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


def _draw_for_whole_prompts() -> None:
    """Let a request with a seed draw a token only when its whole prompt is computed.

    vLLM draws one behind each part of a prompt, drops it and turns the generator back by an offset.
    A generator of the CPU has none, so the first such request would end the engine.
    """
    runner: Any = importlib.import_module("vllm.v1.worker.gpu_model_runner").GPUModelRunner
    sample = runner.sample_tokens

    def sample_tokens(self: Any, *args: Any) -> Any:
        batch = self.input_batch
        (parts,) = self.discard_request_mask.np[: batch.num_reqs].nonzero()
        kept = {i: batch.generators.pop(i) for i in parts.tolist() if i in batch.generators}
        try:
            return sample(self, *args)
        finally:
            batch.generators.update(kept)

    runner.sample_tokens = sample_tokens


def install() -> None:
    """Prepare for these modules once they are used here; for processes that may never."""
    sys.meta_path.insert(0, _WhenUsed())
