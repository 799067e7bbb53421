"""From tokens' states to vectors: pooling, and the layers after it.

States are [inputs, tokens, width], their mask [inputs, tokens], the result [inputs, width].
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millstream_server.embedding.model_files import CLS, LAST, MEAN, ModelUse
from millstream_server.runtime.errors import EngineFailedError

GENERATES = "ForCausalLM"
_FIRST_TOKEN = ("BertModel", "RobertaModel", "XLMRobertaModel")
_ACTIVATIONS = ("Identity", "Tanh", "ReLU", "GELU", "Sigmoid")
_SENTENCE = "sentence_embedding"

Finish = Callable[[Any, Any], Any]
"""Makes results, one per input, of states and their mask."""
Layer = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class Place:
    """Where tensors are, and of which type."""

    torch: Any
    device: str
    dtype: Any


def pooling(path: Path, use: ModelUse, named: str, width: int, place: Place) -> tuple[Finish, int]:
    """Return what makes a model's vectors of its states, and their width.

    ``named`` is the model's class, ``width`` that of a state.

    Raises:
        EngineFailedError: the files don't say how, or it can't be done.
    """
    usual = LAST if named.endswith(GENERATES) else CLS if named in _FIRST_TOKEN else ""
    ways = (use.pooling or usual).split("+")
    if unknown := [way for way in ways if way not in _WAYS]:
        raise EngineFailedError(
            f"The model's vectors are pooled as {unknown[0]!r}, which can't be done here."
            if unknown[0]
            else f"The model is a {named or 'model of no class'}, and no 1_Pooling/config.json "
            "says how its vectors are pooled."
        )
    layers, made_width = _layers(path, use, width * len(ways), place)

    def finish(states: Any, mask: Any) -> Any:
        vectors = place.torch.cat([_WAYS[way](place.torch, states, mask) for way in ways], dim=1)
        for layer in layers:
            vectors = layer(vectors)
        return vectors

    return finish, made_width


def _layers(path: Path, use: ModelUse, width: int, place: Place) -> tuple[Sequence[Layer], int]:
    """Load what comes after pooling, without a last Normalize: the worker does that itself."""
    layers: list[Layer] = []
    for number, module in enumerate(use.modules, 1):
        match module.kind:
            case "Pooling" | "Dropout":
                pass
            case "Normalize":
                if number < len(use.modules):
                    layers.append(place.torch.nn.functional.normalize)
            case "Dense":
                layer, width = _dense(path / module.folder, width, place)
                layers.append(layer)
            case kind:
                raise EngineFailedError(
                    f"The model's modules.json has a layer {kind}, which isn't known here."
                )
    return layers, width


def _dense(folder: Path, width: int, place: Place) -> tuple[Layer, int]:
    safetensors: Any = importlib.import_module("safetensors.torch")
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        tensors = safetensors.load_file(folder / "model.safetensors")
        weight, bias = tensors["linear.weight"], tensors.get("linear.bias")
    except (OSError, ValueError, KeyError) as error:
        raise EngineFailedError(
            f"The model's layer {folder.name} can't be read: it needs config.json and "
            "model.safetensors."
        ) from error
    activation = str(config.get("activation_function", "Tanh")).rpartition(".")[2]
    given = config.get("module_input_name", _SENTENCE)
    if activation not in _ACTIVATIONS or given != _SENTENCE:
        raise EngineFailedError(
            f"The model's layer {folder.name} has the activation {activation} and reads {given}; "
            f"{', '.join(_ACTIVATIONS)} of {_SENTENCE} can be done here."
        )
    if weight.shape[1] != width:
        raise EngineFailedError(
            f"The model's layer {folder.name} takes {weight.shape[1]} numbers, not {width}."
        )
    linear = place.torch.nn.functional.linear
    weight = weight.to(place.device, place.dtype)
    bias = None if bias is None else bias.to(place.device, place.dtype)
    activated = getattr(place.torch.nn, activation)()
    return lambda rows: activated(linear(rows, weight, bias)), int(weight.shape[0])


# ---- the ways ------------------------------------------------------------------------------------


def last_token(torch: Any, states: Any, mask: Any) -> Any:
    """Return each input's last state."""
    rows = torch.arange(len(states), device=states.device)
    return states[rows, mask.sum(1) - 1]


def _weighted(_torch: Any, states: Any, weights: Any) -> Any:
    weights = weights.to(states.dtype).unsqueeze(-1)
    return (states * weights).sum(1) / weights.sum(1)


def _by_root(torch: Any, states: Any, mask: Any) -> Any:
    given = mask.to(states.dtype).unsqueeze(-1)
    return (states * given).sum(1) / torch.sqrt(given.sum(1))


def _rising(torch: Any, states: Any, mask: Any) -> Any:
    places = torch.arange(1, states.shape[1] + 1, device=states.device)
    return _weighted(torch, states, mask * places)


def _highest(_torch: Any, states: Any, mask: Any) -> Any:
    return states.masked_fill(mask.unsqueeze(-1) == 0, float("-inf")).max(1).values


_WAYS: dict[str, Callable[[Any, Any, Any], Any]] = {
    CLS: lambda _torch, states, _mask: states[:, 0],
    LAST: last_token,
    MEAN: _weighted,
    "max": _highest,
    "mean_sqrt_len_tokens": _by_root,
    "weightedmean": _rising,
}
