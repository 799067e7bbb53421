# ruff: noqa: INP001 - a folder for PYTHONPATH, not a package
"""Pure-PyTorch stand-in for the compiled package `sgl_kernel`, which exists for GPUs and AMX CPUs.

Without AMX SGLang has a plain PyTorch path for every layer. It still uses names bound at import and
the few functions below. Never define an operator called ``convert_weight_packed``: SGLang would
take this for the AMX build.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import torch

__version__ = "0+millstream.cpu"


def __getattr__(name: str) -> Callable[..., NoReturn]:
    """Return a stub for a kernel that SGLang imports at module level; calling it raises."""
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_args: object, **_kwargs: object) -> NoReturn:
        message = f"SGLang called sgl_kernel.{name}, which the CPU stand-in does not have."
        raise NotImplementedError(message)

    return missing


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    _pool_len: int,
) -> None:
    """Write each request's new cache slots into its row, as `mem_cache/allocation.py` needs."""
    taken = 0
    rows = zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True)
    for row, start, end in rows:
        slots = out_cache_loc[taken : taken + end - start]
        req_to_token[row, start:end] = slots.to(req_to_token.dtype)
        taken += end - start


_MASK = 0xFFFFFFFF


def _rotate_left(value: torch.Tensor, bits: int) -> torch.Tensor:
    return ((value << bits) | (value >> (32 - bits))) & _MASK


def _mix(state: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
    block = _rotate_left((block * 0xCC9E2D51) & _MASK, 15)
    state = _rotate_left(state ^ ((block * 0x1B873593) & _MASK), 13)
    return (state * 5 + 0xE6546B64) & _MASK


def _murmur_hash32(
    seed: torch.Tensor, positions: torch.Tensor, columns: torch.Tensor
) -> torch.Tensor:
    """MurmurHash3 x86 32-bit of (64-bit seed, position, column): SGLang's seeded sampling noise.

    int64 products wrap modulo 2**64, so their low 32 bits are exact.
    """
    low_high = seed.to(torch.int64)[:, None]
    state = _mix(torch.zeros_like(low_high), low_high & _MASK)
    state = _mix(state, (low_high >> 32) & _MASK)
    state = _mix(state, positions.to(torch.int64)[:, None] & _MASK)
    state = _mix(state, columns.to(torch.int64)[None, :] & _MASK) ^ 16
    state = ((state ^ (state >> 16)) * 0x85EBCA6B) & _MASK
    state = ((state ^ (state >> 13)) * 0xC2B2AE35) & _MASK
    return (state ^ (state >> 16)).to(torch.uint32)


_library = torch.library.Library("sgl_kernel", "FRAGMENT")
_library.define("murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor columns) -> Tensor")
_library.impl("murmur_hash32_cpu", _murmur_hash32, "CPU")
# For the transformers of diffusion models (`multimodal_gen`), Wan's among them.
_library.define("fused_scale_shift_cpu(Tensor x, Tensor scale, Tensor shift, float c) -> Tensor")
_library.impl("fused_scale_shift_cpu", lambda x, scale, shift, c: x * (c + scale) + shift, "CPU")
# Operators that qwen3_5, muse_glimmer and grok bind at import (the multimodal processors import
# those models). No implementation: PyTorch raises NotImplementedError when one is called.
for _name in (
    "fused_sigmoid_mul_cpu",
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
    "fused_moe_router_cpu",
    "rmsnorm_cpu",
    "fused_dual_residual_rmsnorm_cpu",
):
    _library.define(f"{_name}(Tensor x) -> Tensor")
