# ruff: noqa: INP001 - a folder for PYTHONPATH, not a package
"""SGLang plugins (entry-point groups ``sglang.srt.plugins`` and ``sglang.multimodal_gen.plugins``).

SGLang loads the first in the processes of engine, scheduler and detokenizer, the second in those of
its diffusion models. Each patch first checks that what it replaces is what it expects, and raises
if it isn't.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable
from importlib.util import find_spec
from types import ModuleType
from typing import Any


class _HostEvent:
    """Stand-in for `torch.cuda.Event`: work on the CPU is synchronous, so always complete."""

    def __init__(self, *_flags: object, **_options: object) -> None:
        pass

    def record(self, *_args: object) -> None:
        pass

    wait = synchronize = record

    def query(self) -> bool:
        return True


def _module_with(name: str, *attributes: str) -> ModuleType:
    module = importlib.import_module(name)
    for attribute in attributes:
        if not hasattr(module, attribute):
            raise RuntimeError(
                f"The CPU stand-in patches {name}.{attribute}, which this SGLang does not have: "
                "adapt the stand-in to this version."
            )
    return module


def _use_host_events() -> None:
    """Replace `torch.cuda.Event`, which prefill records when a prefix is already cached.

    CPU PyTorch raises "Tried to instantiate dummy base class Event".
    """
    import torch  # noqa: PLC0415 - not before SGLang asks for the plugin

    if torch.cuda.is_available():
        raise RuntimeError("The CPU stand-in must not be active where a CUDA GPU is available.")
    torch.cuda.Event = _HostEvent  # type: ignore[assignment,misc]


def _register_kv_cache_as_host_memory() -> None:
    """Register KV pools as host memory: the NIXL backend assumes GPU memory ("VRAM").

    On the CPU the pools are in host memory, which UCX refuses to register as VRAM.
    """
    if find_spec("nixl") is None:
        return
    conn: Any = _module_with("sglang.srt.disaggregation.nixl.conn", "_normalize_kv_mem_kinds")
    original = conn._normalize_kv_mem_kinds  # noqa: SLF001 - checked to be there

    def all_dram(kinds: list[str] | None, expected_len: int) -> list[str]:
        del kinds
        answer: list[str] = original(["DRAM"] * expected_len, expected_len)
        return answer

    conn._normalize_kv_mem_kinds = all_dram  # noqa: SLF001


def _calm_nixl_progress_thread() -> None:
    """See `calm_nixl`."""
    if find_spec("nixl") is not None:
        importlib.import_module("millstream_server.engines.torch_on_cpu").calm_nixl()


def _allow_deterministic_sampling() -> None:
    """Allow seeds: SGLang permits deterministic inference with GPU attention kernels only.

    PyTorch's CPU operators are deterministic already, so the backend is added to SGLang's list and
    the call that installs GPU kernels does nothing.
    """
    choices: Any = _module_with(
        "sglang.srt.arg_groups.choices", "add_deterministic_attention_backend_choices"
    )
    choices.add_deterministic_attention_backend_choices(["torch_native"])
    for name in (
        "sglang.srt.batch_invariant_ops",
        "sglang.srt.batch_invariant_ops.batch_invariant_ops",
    ):
        module: Any = _module_with(name, "enable_batch_invariant_mode")
        module.enable_batch_invariant_mode = lambda *_args, **_kwargs: None


class _Unpinned:
    """`torch` for a module that asks for pinned memory, which CPU PyTorch doesn't have."""

    _MAKERS = frozenset({"arange", "empty", "full", "ones", "tensor", "zeros"})

    def __init__(self, torch: ModuleType) -> None:
        self._torch = torch

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._torch, name)
        if name not in self._MAKERS:
            return found

        def make(*args: object, **options: object) -> object:
            options.pop("pin_memory", None)
            return found(*args, **options)

        return make


def _load_adapters_without_pinned_memory() -> None:
    """Let LoRA run: its layers and its backend pin memory, which needs a GPU.

    CPU PyTorch raises "pin_memory=True requires a CUDA or other accelerator backend".
    """
    import torch  # noqa: PLC0415 - not before SGLang asks for the plugin

    for name in ("sglang.srt.lora.layers", "sglang.srt.lora.backend.torch_backend"):
        module: Any = _module_with(name, "torch")
        if "pin_memory" not in inspect.getsource(module):
            message = f"The CPU stand-in patches {name}, which pins no memory: remove the patch."
            raise RuntimeError(message)
        if not isinstance(module.torch, _Unpinned):
            module.torch = _Unpinned(torch)
    torch.Tensor.pin_memory = lambda self, *_args, **_options: self  # type: ignore[method-assign]


@functools.cache
def register() -> None:
    """Apply all patches, once per process.

    Raises:
        RuntimeError: SGLang has changed, or there is a GPU.
    """
    _use_host_events()
    _register_kv_cache_as_host_memory()
    _calm_nixl_progress_thread()
    _allow_deterministic_sampling()
    _load_adapters_without_pinned_memory()


def _call_norms_as_plain_pytorch() -> None:
    """Let two layers of Wan's transformer use their PyTorch path instead of an AMX kernel."""
    module: Any = _module_with(
        "sglang.multimodal_gen.runtime.layers.layernorm",
        "_NormScaleShift",
        "_ScaleResidualNormScaleShift",
    )
    for kind in (module._NormScaleShift, module._ScaleResidualNormScaleShift):  # noqa: SLF001
        kernel = "sgl_kernel.fused_"
        if kernel not in inspect.getsource(kind.forward_cpu) or not hasattr(kind, "forward_native"):
            raise RuntimeError(
                f"The CPU stand-in replaces {kind.__name__}.forward_cpu, which in this SGLang "
                "calls no kernel: remove the patch."
            )
        kind.forward_cpu = kind.forward_native


@functools.cache
def register_diffusion() -> None:
    """Apply the patches that diffusion models need, once per process.

    Raises:
        RuntimeError: SGLang has changed.
    """
    _call_norms_as_plain_pytorch()


def _or_exit(apply: Callable[[], None]) -> None:
    """SGLang logs a plugin's exception and goes on, so a failure ends the process."""
    try:
        apply()
    except (ImportError, RuntimeError) as error:
        sys.exit(f"millstream: the CPU stand-in for SGLang cannot be applied: {error}")


def register_or_exit() -> None:
    """Entry point of the first group."""
    _or_exit(register)


def register_diffusion_or_exit() -> None:
    """Entry point of the second group."""
    _or_exit(register_diffusion)
