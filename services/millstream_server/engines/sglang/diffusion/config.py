"""How SGLang's diffusion engine is started: our settings, and SGLang's arguments made from them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from millstream_server.engines.config import free_port
from millstream_server.engines.torch_on_cpu import resolved
from millstream_server.runtime.errors import EngineFailedError

INDEX = "model_index.json"

# SGLang knows a model by its published name. One of each family, for folders with other names:
# further models of a family need `model_id`, as their arithmetic may differ.
_MODEL_IDS: Mapping[str, str] = {
    "FluxPipeline": "FLUX.1-dev",
    "QwenImagePipeline": "Qwen-Image",
    "WanPipeline": "Wan2.1-T2V-1.3B-Diffusers",
    "ZImagePipeline": "Z-Image-Turbo",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangDiffuserConfig:
    """Settings of one engine."""

    model_path: Path
    """Folder of a pipeline: `model_index.json` and a folder for each part."""
    model_id: str = ""
    """Published name of the model, as "Z-Image-Turbo"; empty: by the folder's name or the
    pipeline's class."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """"auto" uses the GPU where there is one; the CPU needs `engines.sglang.cpu`."""
    num_gpus: int = 1
    warm_up_timeout_s: float = 300.0
    cancel_timeout_s: float = 10.0
    """An engine that goes on so long after a cancel is killed and started again; and at least
    three times the longest step so far."""
    max_restarts: int = 3
    """Restarts within `restart_window_s`; one more failure ends the engine."""
    restart_window_s: float = 600.0
    extra: Mapping[str, object] = field(default_factory=dict)
    """Further fields of SGLang's ServerArgs for diffusion, passed on unchanged."""
    log_level: str = "warning"
    """Level of SGLang's loggers, in this process and in those it spawns."""

    def resolved_device(self) -> str:
        return resolved(self.device)


def generator_arguments(
    config: SglangDiffuserConfig, knows: Callable[[str], bool]
) -> dict[str, object]:
    """Make the keyword arguments of `DiffGenerator.from_pretrained`.

    ``knows`` says whether SGLang recognises a model by the name of its folder.

    Raises:
        EngineFailedError: `extra` names a field managed by us, or the model isn't recognised.
    """
    managed: dict[str, object] = {
        "model_path": str(config.model_path),
        "num_gpus": config.num_gpus,
        "log_level": config.log_level,
        # Else SGLang runs what it doesn't know with diffusers, where our hook has no effect.
        "backend": "sglang",
        # By default the idle scheduler spins.
        "sleep_on_idle": True,
        # We warm up ourselves.
        "warmup_mode": "off",
        # Nothing is written to files.
        "output_path": "",
        "input_save_path": "",
    }
    if model_id := _model_id(config, knows):
        managed["model_id"] = model_id
    for name in config.extra:
        if name in managed or name == "model_id":
            message = f"extra: {name!r} follows from the engine's other settings; set those."
            raise EngineFailedError(message)
    # SGLang looks for them from a fixed one, and binds seconds later: two that start at once clash.
    ports = {"master_port": free_port(), "scheduler_port": free_port()}
    return {**ports, **managed, **config.extra}


def _model_id(config: SglangDiffuserConfig, knows: Callable[[str], bool]) -> str:
    if config.model_id:
        if not knows(config.model_id):
            message = f"SGLang has no diffusion model with the id {config.model_id!r}."
            raise EngineFailedError(message)
        return config.model_id
    if knows(str(config.model_path)):
        return ""
    try:
        index = json.loads((config.model_path / INDEX).read_text(encoding="utf-8"))
        kind = str(index["_class_name"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise EngineFailedError(f"The model's {INDEX} can't be read.") from error
    if kind not in _MODEL_IDS:
        raise EngineFailedError(
            f"The model is a {kind}, and its folder's name isn't one that SGLang knows: give the "
            "model's published name as the model id."
        )
    return _MODEL_IDS[kind]
