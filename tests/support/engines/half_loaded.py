"""Imported into SGLang's processes: a checkpoint in a directory "fails" is loaded half-way.

The update then fails, as SGLang says it; what it would do next, loading the same again, is left
out.
"""

from __future__ import annotations

import importlib
from typing import Any

_updater: Any = importlib.import_module(
    "sglang.srt.model_executor.model_runner_components.weight_updater"
).WeightUpdater
_update = _updater.update_weights_from_disk


def _half(self: Any, model_path: str, *arguments: Any, **options: Any) -> tuple[bool, str]:
    if not model_path.endswith("fails"):
        done: tuple[bool, str] = _update(self, model_path, *arguments, **options)
        return done
    load_file = importlib.import_module("safetensors.torch").load_file
    weights = list(load_file(f"{model_path}/model.safetensors").items())
    self.get_model().load_weights(weights[: len(weights) // 2])
    return False, "Failed to update weights: no more.\nRolling back to original weights."


_updater.update_weights_from_disk = _half
