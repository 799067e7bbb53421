"""Vision towers: their Protocol, those of transformers, and none at all.

Of transformers only the tower is loaded, never the language model.
"""

from __future__ import annotations

import contextlib
import importlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from millstream_server.encode.encoder import Prepared
from millstream_server.engines import torch_on_cpu
from millstream_server.engines.adapter import EncoderSettings
from millstream_server.media.families.family import Family
from millstream_server.media.items import Content, Modality
from millstream_server.runtime.errors import EngineFailedError

_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
# Prefixes under which published and newly saved checkpoints keep the same tensors.
_QWEN = ("visual.", "model.visual.")
_SIGLIP = (
    "vision_tower.vision_model.",
    "model.vision_tower.vision_model.",
    "vision_tower.",
    "model.vision_tower.",
)
_PROJECTOR = ("multi_modal_projector.", "model.multi_modal_projector.")

Run = Callable[[Any, Any, Sequence[int]], Iterable[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerConfig(EncoderSettings):
    """Settings of an encoder: a model's."""

    model_path: Path


@dataclass(frozen=True, slots=True)
class PixelInputs:
    """What `Prepared.inputs` is: the processor's tensors of one item."""

    pixels: Any
    """[patches, values], or [1, colours, height, width] for families without a grid."""
    grid: Any
    """[1, 3], or None for families without."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerFacts:
    """What a loaded tower is."""

    engine: str
    version: str
    kind: str
    """What its rows depend on besides model and processor, such as its type of numbers."""
    device: str = ""


class Tower(Protocol):
    """A vision tower; every call comes from the same thread."""

    @property
    def content(self) -> Content:
        """What it makes."""

    def load(self, family: Family) -> TowerFacts:
        """Load the weights. Anything may be raised."""

    def run(self, modality: Modality, batch: Sequence[Prepared]) -> Sequence[Any]:
        """Return a torch tensor per item, on any device. Anything may be raised."""

    def close(self) -> None:
        """Release everything, also after a failed `load`."""


class TransformersTower:
    """Satisfies `Tower` for every family; memory: the tower's weights and one batch."""

    content = Content.ROWS

    def __init__(self, config: TowerConfig) -> None:
        self._config = config
        self._torch: Any = None
        self._run: Run | None = None
        self._device = ""
        self._dtype: Any = None

    def load(self, family: Family) -> TowerFacts:
        """Build the tower and read its tensors only."""
        torch_on_cpu.prepare()
        self._torch = torch = importlib.import_module("torch")
        transformers = importlib.import_module("transformers")
        self._device = torch_on_cpu.torch_device(self._config.device, torch)
        self._dtype = torch_on_cpu.torch_dtype(self._config.dtype, self._device, torch)
        config = transformers.AutoConfig.from_pretrained(self._config.model_path)
        build = _BUILDERS[family.name]
        with torch.inference_mode():
            self._run = build(config, self._place)
        return TowerFacts(
            engine="transformers",
            version=str(transformers.__version__),
            kind=f"transformers {transformers.__version__} {self._dtype}",
            device=self._device,
        )

    def _place(self, module: Any, prefixes: Sequence[str]) -> Any:
        """Give a module its tensors, in our type and on our device."""
        tensors = {
            name: tensor.to(self._dtype)
            for name, tensor in _tensors(self._config.model_path, prefixes)
        }
        missing, unexpected = module.load_state_dict(tensors, strict=False, assign=True)
        if missing or unexpected:
            raise EngineFailedError(
                f"The model's files don't fit its tower: {len(missing)} tensors are missing, "
                f"{len(unexpected)} unknown."
            )
        return module.eval().to(self._device)

    def run(self, modality: Modality, batch: Sequence[Prepared]) -> Sequence[Any]:
        if self._run is None:
            raise EngineFailedError("The vision tower is not loaded.")
        torch = self._torch
        with torch.inference_mode():
            pixels = torch.cat([item.inputs.pixels for item in batch])
            pixels = pixels.to(self._device, self._dtype)
            grids = [item.inputs.grid for item in batch if item.inputs.grid is not None]
            grid = torch.cat(grids).to(self._device) if grids else None
            return list(self._run(pixels, grid, [item.tokens for item in batch]))

    def close(self) -> None:
        """Drop the weights."""
        self._run = None
        if self._device == "cuda":
            self._torch.cuda.empty_cache()


class NoTower:
    """Satisfies `Tower`; its results are the processor's tensors."""

    content = Content.PIXELS

    def __init__(self, config: TowerConfig) -> None:
        self._config = config
        self._dtype: Any = None

    def load(self, family: Family) -> TowerFacts:
        """Choose the type of the pixels: the engine converts them to that of its tower anyway."""
        torch_on_cpu.prepare()
        torch: Any = importlib.import_module("torch")
        transformers = importlib.import_module("transformers")
        device = torch_on_cpu.torch_device(self._config.device, torch)
        self._dtype = torch_on_cpu.torch_dtype(self._config.dtype, device, torch)
        return TowerFacts(
            engine="transformers",
            version=str(transformers.__version__),
            kind=f"pixels {transformers.__version__} {self._dtype}",
        )

    def run(self, modality: Modality, batch: Sequence[Prepared]) -> Sequence[Any]:
        return [item.inputs.pixels.to(self._dtype) for item in batch]

    def close(self) -> None:
        """There is nothing to release."""


def _build_qwen(config: Any, place: Callable[[Any, Sequence[str]], Any]) -> Run:
    visual = place(_empty(config.vision_config), _QWEN)

    def run(pixels: Any, grid: Any, tokens: Sequence[int]) -> Iterable[Any]:
        torch: Any = importlib.import_module("torch")
        made = visual(pixels, grid_thw=grid, return_dict=True)
        # Deepstack levels stand beside the merged row; Qwen2.5-VL has none.
        levels = getattr(made, "deepstack_features", None) or ()
        rows = torch.cat([made.pooler_output, *levels], dim=1)
        split: Iterable[Any] = torch.split(rows, list(tokens))
        return split

    return run


def _build_gemma3(config: Any, place: Callable[[Any, Sequence[str]], Any]) -> Run:
    tower = place(_empty(config.vision_config), _SIGLIP)
    modeling = importlib.import_module("transformers.models.gemma3.modeling_gemma3")
    projector = place(modeling.Gemma3MultiModalProjector(config), _PROJECTOR)

    def run(pixels: Any, _grid: Any, _tokens: Sequence[int]) -> Iterable[Any]:
        hidden = tower(pixel_values=pixels, return_dict=True).last_hidden_state
        rows: Iterable[Any] = projector(hidden).unbind(0)
        return rows

    return run


# By name, as it is about modules of transformers: what they are called, take and return.
_BUILDERS: Mapping[str, Callable[[Any, Callable[[Any, Sequence[str]], Any]], Run]] = {
    "qwen2_5_vl": _build_qwen,
    "qwen3_vl": _build_qwen,
    "gemma3": _build_gemma3,
}


def _empty(config: Any) -> Any:
    """Build a tower whose weights are not drawn: each is replaced."""
    transformers = importlib.import_module("transformers")
    with importlib.import_module("transformers.initialization").no_init_weights():
        return transformers.AutoModel.from_config(config)


def _tensors(model_path: Path, prefixes: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yield the tensors under the first of the prefixes that fits, without it."""
    safetensors: Any = importlib.import_module("safetensors")
    for name in _files(model_path, prefixes):
        with contextlib.ExitStack() as stack:
            file = stack.enter_context(safetensors.safe_open(model_path / name, framework="pt"))
            for key in file.keys():  # noqa: SIM118 - not a dictionary
                prefix = next((start for start in prefixes if key.startswith(start)), None)
                if prefix is not None:
                    yield key.removeprefix(prefix), file.get_tensor(key)


def _files(model_path: Path, prefixes: Sequence[str]) -> Iterable[str]:
    """Return the names of the weight files that have such tensors."""
    index = model_path / _INDEX
    if not index.is_file():
        return [_WEIGHTS]
    names: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    return sorted({file for key, file in names.items() if key.startswith(tuple(prefixes))})
