"""Checkpoints beside a random model, whole and broken, and LoRA adapters for it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np


def weights_of(model: Path) -> dict[str, np.ndarray]:
    """Return a model's tensors."""
    from safetensors.numpy import load_file  # noqa: PLC0415 - only tests with a model need it

    files = sorted(model.glob("*.safetensors"))
    return {name: value for file in files for name, value in load_file(file).items()}


def save(model: Path, folder: Path, weights: Mapping[str, np.ndarray], *, shards: int = 1) -> Path:
    """Write a checkpoint with ``model``'s other files; several files get an index."""
    from safetensors.numpy import save_file  # noqa: PLC0415

    folder.mkdir(parents=True)
    for file in model.glob("*.json"):
        shutil.copy(file, folder)
    names = sorted(weights)
    index: dict[str, str] = {}
    for shard in range(shards):
        part = {name: weights[name] for name in names[shard::shards]}
        name = f"model-{shard + 1:05}.safetensors" if shards > 1 else "model.safetensors"
        save_file(part, folder / name, metadata={"format": "pt"})
        index |= dict.fromkeys(part, name)
    if shards > 1:
        content = json.dumps({"metadata": {}, "weight_map": index})
        (folder / "model.safetensors.index.json").write_text(content)
    return folder


def changed(model: Path, seed: int) -> dict[str, np.ndarray]:
    """Return other weights of the same shapes, the same for the same seed."""
    import numpy as np  # noqa: PLC0415

    random = np.random.default_rng(seed)
    return {
        name: value
        if value.ndim == 1
        else random.standard_normal(value.shape, dtype=np.float32) * np.float32(0.5)
        for name, value in weights_of(model).items()
    }


def make_adapter(
    model: Path,
    folder: Path,
    *,
    seed: int,
    rank: int = 4,
    modules: Sequence[str] = ("q_proj", "v_proj"),
    **config: Any,
) -> tuple[Path, dict[str, np.ndarray]]:
    """Write a LoRA adapter; return it, and the model's weights with it merged in.

    That is what LoRA means: W + B·A·alpha/r.
    """
    import numpy as np  # noqa: PLC0415
    from safetensors.numpy import save_file  # noqa: PLC0415

    random = np.random.default_rng(seed)
    alpha = 2 * rank
    merged = weights_of(model)
    tensors: dict[str, np.ndarray] = {}
    for name, value in list(merged.items()):
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] not in modules:
            continue
        rows, columns = value.shape
        a = random.standard_normal((rank, columns), dtype=np.float32) * np.float32(0.3)
        b = random.standard_normal((rows, rank), dtype=np.float32) * np.float32(0.3)
        tensors[f"base_model.model.{module}.lora_A.weight"] = a
        tensors[f"base_model.model.{module}.lora_B.weight"] = b
        merged[name] = value + (b @ a) * np.float32(alpha / rank)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    plain = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": list(modules)}
    (folder / "adapter_config.json").write_text(json.dumps({**plain, "bias": "none", **config}))
    return folder, merged
