"""Which models SGLang embeds or ranks with as they were trained, read from their files.

SGLang starts with many others too, and gives wrong numbers: it ignores the pooling that a model
names, gives no segment types to token ids, and adds a bias to the heads of some classes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from millstream_server.engines.sglang.config import SglangEngineConfig
from millstream_server.engines.vectors import table_positions
from millstream_server.runtime.errors import EngineFailedError

_LAST, _CLS = "lasttoken", "cls"
_DECODERS = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
_ENCODERS = ("BertModel", "XLMRobertaModel")
_RANKERS = ("BertForSequenceClassification", "XLMRobertaForSequenceClassification")
_HEADS_WITH_A_BIAS = ("Qwen2ForSequenceClassification", "Qwen3ForSequenceClassification")
_CPU_RUNNING = 64
_CPU_ENCODER_MEMORY = 0.3
"""Of a machine's memory; SGLang reserves so little for models without a KV cache that it fails."""
_POOLING_FLAGS = {
    "pooling_mode_cls_token": _CLS,
    "pooling_mode_lasttoken": _LAST,
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class VectorModel:
    """What an engine has to know about a model before it starts."""

    embeds: bool
    """Whether it makes vectors; else it ranks."""
    encoder_only: bool
    """Whether each token attends to all others, so that a prompt can be neither cut nor cached."""
    width: int
    """Numbers of a vector; 0: it makes none."""
    dimensions: tuple[int, ...]
    positions: int | None = None
    """Most tokens that its table of positions has room for; None: it has no table."""
    overrides: Mapping[str, object] = field(default_factory=dict)
    """What SGLang must read in its config.json."""


def read_model(path: Path, dimensions: Sequence[int] = ()) -> VectorModel:
    """Read a model's files; ``dimensions`` are used instead of those that config.json names.

    Raises:
        EngineFailedError: it isn't a model that SGLang embeds or ranks with correctly.
    """
    config = _json(path / "config.json")
    architecture = _architecture(config)
    if architecture in _RANKERS:
        _check_ranker(config, architecture)
    else:
        _check_pooling(path, _LAST if architecture in _DECODERS else _CLS)
    embeds = architecture not in _RANKERS
    width = int(config["hidden_size"])
    return VectorModel(
        embeds=embeds,
        encoder_only=architecture not in _DECODERS,
        width=width if embeds else 0,
        dimensions=_dimensions(config, width, dimensions) if embeds else (),
        positions=_positions(config, architecture),
        overrides=_overrides(config, architecture),
    )


def with_ability(config: SglangEngineConfig, model: VectorModel) -> SglangEngineConfig:
    """Add the arguments without which SGLang fails with such a model, or is wrong."""
    on_cpu = config.resolved_device() == "cpu"
    ability: dict[str, object] = {"is_embedding": True}
    if model.encoder_only:
        ability |= {"disable_radix_cache": True, "chunked_prefill_size": -1}
        if on_cpu:
            ability["mem_fraction_static"] = _CPU_ENCODER_MEMORY
    if model.overrides:
        ability["json_model_override_args"] = json.dumps(model.overrides)
    if int(str(config.extra.get("dp_size", 1))) > 1:
        raise EngineFailedError(
            "extra: dp_size is 1 for embedding, as SGLang can't be told which rank to try; run "
            "one worker per rank."
        )
    running = config.max_running_requests or (_CPU_RUNNING if on_cpu else None)
    return replace(config, ability=ability, max_running_requests=running, multimodal=False)


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise EngineFailedError(f"The model's {path.name} can't be read.") from error
    if not isinstance(content, dict):
        raise EngineFailedError(f"The model's {path.name} is not a JSON object.")
    return content


def _architecture(config: Mapping[str, Any]) -> str:
    named = [str(name) for name in config.get("architectures") or ()]
    if found := [name for name in named if name in (*_DECODERS, *_ENCODERS, *_RANKERS)]:
        return found[0]
    if found := [name for name in named if name in _HEADS_WITH_A_BIAS]:
        raise EngineFailedError(
            f"The model is a {found[0]}: SGLang adds a bias to the heads of this class that the "
            "checkpoint doesn't have, so its scores would be wrong. Use a ranker of the class "
            "XLMRobertaForSequenceClassification."
        )
    raise EngineFailedError(
        f"The model is a {', '.join(named) or 'model without architectures in config.json'}. "
        f"Classes that embed are {', '.join((*_DECODERS, *_ENCODERS))}; classes that rank are "
        f"{', '.join(_RANKERS)}."
    )


def _check_ranker(config: Mapping[str, Any], architecture: str) -> None:
    labels = len(config["id2label"]) if "id2label" in config else int(config.get("num_labels", 2))
    if labels != 1:
        raise EngineFailedError(
            f"The model has {labels} labels: it classifies. A model that ranks has 1."
        )
    if architecture.startswith("Bert") and int(config.get("type_vocab_size", 2)) > 1:
        raise EngineFailedError(
            "The model distinguishes query and document by segment types, and SGLang gives all "
            "token ids the first type, so its scores would be wrong. Use a ranker of the class "
            "XLMRobertaForSequenceClassification."
        )


def _check_pooling(path: Path, ours: str) -> None:
    """Check the files of sentence-transformers, if there are any, against what SGLang does."""
    if (path / "modules.json").is_file():
        modules = json.loads((path / "modules.json").read_text(encoding="utf-8"))
        kinds = [str(module.get("type", "")).rpartition(".")[2] for module in modules]
        if more := sorted(set(kinds) - {"Transformer", "Pooling", "Normalize"}):
            raise EngineFailedError(
                f"The model's modules.json has a layer {', '.join(more)} after pooling, which "
                "SGLang would leave out, so its vectors would be wrong."
            )
    if (path / "1_Pooling" / "config.json").is_file():
        theirs = _pooling(_json(path / "1_Pooling" / "config.json"))
        if theirs and theirs != ours:
            raise EngineFailedError(
                f"The model's vectors are pooled as {theirs!r}; SGLang pools models of this class "
                f"as {ours!r}, so its vectors would be wrong."
            )


def _pooling(config: Mapping[str, Any]) -> str:
    if isinstance(config.get("pooling_mode"), str):
        return str(config["pooling_mode"])
    return "+".join(name for flag, name in _POOLING_FLAGS.items() if config.get(flag))


def _dimensions(config: Mapping[str, Any], width: int, chosen: Sequence[int]) -> tuple[int, ...]:
    """Return to what the vectors may be cut: what was trained, nothing that nobody vouches for."""
    named = chosen or config.get("matryoshka_dimensions") or ()
    if not named and config.get("is_matryoshka"):
        return tuple(range(1, width + 1))  # what SGLang takes it to mean
    found = tuple(sorted({int(number) for number in named}))
    if found and not (found[0] >= 1 and found[-1] <= width):
        raise EngineFailedError(
            f"The model's vectors have {width} numbers; they can't be cut to "
            f"{', '.join(map(str, found))}: name numbers from 1 to {width}."
        )
    return found


def _positions(config: Mapping[str, Any], architecture: str) -> int | None:
    if architecture in _DECODERS:
        return None
    return table_positions(config, after_padding=architecture.startswith("XLMRoberta"))


def _overrides(config: Mapping[str, Any], architecture: str) -> dict[str, object]:
    found: dict[str, object] = {}
    if architecture in _DECODERS:
        return found
    position_type = config.get("position_embedding_type")
    if position_type is None:  # transformers no longer writes it, and SGLang insists on it
        found["position_embedding_type"] = "absolute"
    elif position_type != "absolute":
        raise EngineFailedError(
            f"The model has positions of the type {position_type!r}; SGLang has 'absolute' only."
        )
    if config.get("sbert_ce_default_activation_function"):
        # Scores are made of the plain logit, here and not in SGLang.
        found["sbert_ce_default_activation_function"] = None
    return found
