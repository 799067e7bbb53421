"""LoRA adapters: checked against the model that runs, loaded into SGLang, and removed.

SGLang finds out too late: a tensor of another shape, or of a module that it wasn't prepared for,
ends its scheduler with the adapter's first request. It leaves out what it doesn't know, without an
error.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millstream_server.control.operations import LoraAdapter
from millstream_server.engines.checkpoint import (
    ADAPTER_FILE,
    Checkpoint,
    adapter_tensors,
    read_json,
)
from millstream_server.engines.sglang.control.controlled import ControlledEngine
from millstream_server.model_files.weights import StoredTensor
from millstream_server.runtime.errors import InternalError, InvalidWeightsError
from millstream_server.runtime.telemetry.log import get_log

_CONFIG = "adapter_config.json"
_PREFIX = "base_model.model."
_NAME = re.compile(r"(?P<module>.+)\.lora_(?P<side>[AB])\.weight")
_TOGETHER = (("q_proj", "v_proj"), ("k_proj", "q_proj"), ("up_proj", "gate_proj"))
"""Where SGLang applies the first of them, it needs the second of the same layer."""
_MUST_BE_OFF = {
    "use_dora": "DoRA",
    "use_rslora": "rank-stabilized scaling (use_rslora)",
    "rank_pattern": "different ranks (rank_pattern)",
    "alpha_pattern": "different scalings (alpha_pattern)",
    "modules_to_save": "whole modules (modules_to_save)",
    "lora_bias": "biases (lora_bias)",
    "trainable_token_indices": "trained tokens (trainable_token_indices)",
    "megatron_config": "megatron_config",
}
"""What SGLang ignores or doesn't have."""
_FLOATS = frozenset({"F32", "F16", "BF16"})


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterLimits:
    """What the engine was prepared for."""

    max_rank: int
    modules: Collection[str]


def check_adapter(name: str, path: Path, loaded: Checkpoint, limits: AdapterLimits) -> LoraAdapter:
    """Check an adapter's directory.

    Raises:
        InvalidWeightsError: files are missing or not complete, or don't fit to the model.
    """
    config = read_json(path / _CONFIG)
    if config.get("peft_type") != "LORA":
        raise InvalidWeightsError(
            f"{path / _CONFIG} isn't a LoRA adapter's: peft_type must be LORA."
        )
    rank = _check_config(path, config, limits)
    tensors = _read_tensors(path)
    modules: dict[str, set[str]] = {}
    for tensor in tensors:
        found = _NAME.fullmatch(tensor.name)
        if found is None:
            raise InvalidWeightsError(f"{path}: {tensor.name!r} is no part of a LoRA adapter.")
        module = found["module"].removeprefix(_PREFIX)
        _check_module(path, module, limits)
        _check_tensor(path, tensor, _shape(path, module, found["side"], rank, loaded))
        modules.setdefault(module, set()).add(found["side"])
    _check_whole(path, modules)
    return LoraAdapter(name, rank, path)


def _check_config(path: Path, config: Mapping[str, Any], limits: AdapterLimits) -> int:
    """Return the rank."""
    for key, what in _MUST_BE_OFF.items():
        if config.get(key):
            raise InvalidWeightsError(f"{path}: SGLang doesn't have {what} in adapters.")
    if config.get("bias", "none") != "none":
        raise InvalidWeightsError(f"{path}: SGLang doesn't have biases in adapters.")
    rank, alpha, modules = (config.get(key) for key in ("r", "lora_alpha", "target_modules"))
    if type(rank) is not int or rank < 1:
        raise InvalidWeightsError(f"{path / _CONFIG}: r is {rank!r}; it must be a number above 0.")
    if rank > limits.max_rank:
        raise InvalidWeightsError(
            f"{path} has the rank {rank}; this worker takes up to {limits.max_rank} "
            "(--max-lora-rank)."
        )
    if type(alpha) not in {int, float}:
        raise InvalidWeightsError(f"{path / _CONFIG}: lora_alpha is {alpha!r}, not a number.")
    if modules != "all-linear" and not _is_names(modules):
        raise InvalidWeightsError(
            f"{path / _CONFIG}: target_modules must be a list of names, or all-linear."
        )
    for module in modules if isinstance(modules, list) else ():
        _check_module(path, module, limits)
    if (path / "added_tokens.json").exists():
        raise InvalidWeightsError(f"{path} adds tokens, which SGLang doesn't have in adapters.")
    return int(rank)


def _is_names(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(n, str) for n in value)


def _check_module(path: Path, module: str, limits: AdapterLimits) -> None:
    if module.rpartition(".")[2] not in limits.modules:
        raise InvalidWeightsError(
            f"{path} changes {module!r}; this worker takes adapters of "
            f"{', '.join(sorted(limits.modules))} (--lora-target-modules)."
        )


def _read_tensors(path: Path) -> Collection[StoredTensor]:
    tensors = adapter_tensors(path)
    # SGLang would read all of them.
    others = {file.name for file in path.glob("*.safetensors")} - {ADAPTER_FILE}
    if others:
        raise InvalidWeightsError(f"{path} has a file too many: {min(others)}.")
    return tensors


def _shape(path: Path, module: str, side: str, rank: int, loaded: Checkpoint) -> tuple[int, int]:
    """Return the shape that one of a module's matrices needs."""
    base = loaded.tensors.get(f"{module}.weight") or _by_layer(module, loaded)
    if base is None or len(base.shape) != 2:  # noqa: PLR2004 - a matrix
        raise InvalidWeightsError(f"{path} changes {module!r}, which the model doesn't have.")
    rows, columns = base.shape
    return (rank, columns) if side == "A" else (rows, rank)


def _by_layer(module: str, loaded: Checkpoint) -> StoredTensor | None:
    """Find a module that has another prefix in the checkpoint, as in models with vision."""
    _, layers, rest = module.partition(".layers.")
    if not layers:
        return None
    end = f".layers.{rest}.weight"
    found = [
        tensor
        for name, tensor in loaded.tensors.items()
        if name.endswith(end) and not any(word in name for word in ("visual", "vision", "audio"))
    ]
    return found[0] if len(found) == 1 else None


def _check_tensor(path: Path, tensor: StoredTensor, wanted: tuple[int, int]) -> None:
    if tensor.shape != wanted:
        raise InvalidWeightsError(
            f"{path}: {tensor.name!r} has the shape {list(tensor.shape)}; with the adapter's rank "
            f"the model needs {list(wanted)}."
        )
    if tensor.dtype not in _FLOATS:
        raise InvalidWeightsError(f"{path}: {tensor.name!r} has the type {tensor.dtype}.")


def _check_whole(path: Path, modules: Mapping[str, Collection[str]]) -> None:
    for module, sides in modules.items():
        if len(sides) != len("AB"):
            raise InvalidWeightsError(f"{path} has only one of the two matrices of {module!r}.")
        layer, _, last = module.rpartition(".")
        for first, second in _TOGETHER:
            if last == first and f"{layer}.{second}" not in modules:
                raise InvalidWeightsError(
                    f"{path} changes {module!r} but not {second!r} beside it, which SGLang needs."
                )


log = get_log(__name__)


class SglangAdapters:
    """See `control.operations.AdapterControl`.

    SGLang keeps an adapter's path after its removal, and loads it again for the next request that
    names it. So requests are checked against our own list, and SGLang forgets the path.
    """

    def __init__(self, engine: ControlledEngine, loaded: Checkpoint) -> None:
        self._engine = engine
        self._loaded = loaded
        self._limits = AdapterLimits(
            max_rank=engine.config.max_lora_rank, modules=engine.config.lora_target_modules
        )

    async def load_adapter(self, name: str, path: Path) -> LoraAdapter:
        engine = self._engine
        adapter = await asyncio.to_thread(check_adapter, name, path, self._loaded, self._limits)
        message = engine.messages.LoadLoRAAdapterReqInput(lora_name=name, lora_path=str(path))
        result = await engine.call(engine.manager.load_lora_adapter(message))
        if not result.success:
            log.error("the adapter wasn't loaded", adapter=name, reason=result.error_message)
            await self._clear_away(name)
            raise InvalidWeightsError(f"SGLang couldn't load the adapter {name!r} from {path}.")
        engine.runs.adapters.add(name)
        return adapter

    async def _clear_away(self, name: str) -> None:
        """Remove what a failed load has left, which SGLang would refuse to load again."""
        engine = self._engine
        if name in engine.manager.pending_lora_unloads:
            message = engine.messages.UnloadLoRAAdapterReqInput(lora_name=name)
            await engine.call(engine.manager.unload_lora_adapter(message))
        engine.manager.lora_ref_cache.pop(name, None)

    async def unload_adapter(self, name: str) -> None:
        engine = self._engine
        engine.runs.adapters.discard(name)
        engine.manager.lora_ref_cache.pop(name, None)
        message = engine.messages.UnloadLoRAAdapterReqInput(lora_name=name)
        result = await engine.call(engine.manager.unload_lora_adapter(message))
        if not result.success:
            log.error("the adapter wasn't removed", adapter=name, reason=result.error_message)
            raise InternalError(f"SGLang couldn't remove the adapter {name!r}.")
        engine.kv.adapter_unloaded(name)
