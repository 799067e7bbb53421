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

from millstream_server.embedding.model_files import (
    CLS,
    LAST,
    Answers,
    ModelUse,
    UnusableModulesError,
    dimensions_of,
    named_answers,
    read_use,
)
from millstream_server.engines.sglang.config import SglangEngineConfig
from millstream_server.engines.vectors import check_ranker, read_config, table_positions
from millstream_server.runtime.errors import EngineFailedError

_DECODERS = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
_ENCODERS = ("BertModel", "XLMRobertaModel")
_RANKERS = ("BertForSequenceClassification", "XLMRobertaForSequenceClassification")
_HEADS_WITH_A_BIAS = ("Qwen2ForSequenceClassification", "Qwen3ForSequenceClassification")
_ELSEWHERE = "serve it with --engine transformers"
_CPU_RUNNING = 64
_CPU_ENCODER_MEMORY = 0.3
"""Of a machine's memory; SGLang reserves so little for models without a KV cache that it fails."""


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
    answers: Answers | None = None
    """Of a generative model that ranks: SGLang runs it as one that generates."""
    positions: int | None = None
    """Most tokens that its table of positions has room for; None: it has no table."""
    overrides: Mapping[str, object] = field(default_factory=dict)
    """What SGLang must read in its config.json."""


def read_model(
    path: Path, dimensions: Sequence[int] = (), answers: Sequence[str] = ()
) -> VectorModel:
    """Read a model's files; the others are used instead of what they name.

    Raises:
        EngineFailedError: it isn't a model that SGLang embeds or ranks with correctly.
    """
    config = read_config(path / "config.json")
    try:
        use = read_use(path)
        chosen = named_answers(path, answers) or use.answers
        if chosen is not None:
            return _answering(config, chosen)
        architecture = _architecture(config)
        embeds = architecture not in _RANKERS
        if embeds:
            _check_use(use, LAST if architecture in _DECODERS else CLS)
        else:
            check_ranker(
                config,
                bert=architecture.startswith("Bert"),
                segments="and SGLang gives all token ids the first type",
            )
        width = int(config["hidden_size"]) if embeds else 0
        return VectorModel(
            embeds=embeds,
            encoder_only=architecture not in _DECODERS,
            width=width,
            dimensions=dimensions_of(config, width, dimensions),
            positions=_positions(config, architecture),
            overrides=_overrides(config, architecture),
        )
    except UnusableModulesError as error:
        raise EngineFailedError(f"The model can't be used: {error}.") from error


def suits(path: Path) -> bool:
    """Return whether `read_model` takes a model, or no engine does, as its class isn't named."""
    try:
        if not read_config(path / "config.json").get("architectures"):
            return True
        read_model(path)
    except (EngineFailedError, KeyError):
        return False
    return True


def with_ability(config: SglangEngineConfig, model: VectorModel) -> SglangEngineConfig:
    """Add the arguments without which SGLang fails with such a model, or is wrong."""
    on_cpu = config.on_cpu
    ability: dict[str, object] = {"is_embedding": model.answers is None}
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


def _architecture(config: Mapping[str, Any]) -> str:
    named = [str(name) for name in config.get("architectures") or ()]
    if found := [name for name in named if name in (*_DECODERS, *_ENCODERS, *_RANKERS)]:
        return found[0]
    if found := [name for name in named if name in _HEADS_WITH_A_BIAS]:
        raise EngineFailedError(
            f"The model is a {found[0]}: SGLang adds a bias to the heads of this class that the "
            f"checkpoint doesn't have, so its scores would be wrong; {_ELSEWHERE}."
        )
    raise EngineFailedError(
        f"The model is a {', '.join(named) or 'model without architectures in config.json'}. "
        f"Classes that embed on SGLang are {', '.join((*_DECODERS, *_ENCODERS))}; classes that "
        f"rank are {', '.join(_RANKERS)}. If it embeds or ranks, {_ELSEWHERE}."
    )


def _answering(config: Mapping[str, Any], answers: Answers) -> VectorModel:
    """Describe a generative model that ranks by its answer."""
    named = next(iter(config.get("architectures") or ()), "model without architectures")
    if not str(named).endswith("ForCausalLM"):
        raise EngineFailedError(
            f"The model is a {named}: one that ranks by its answer generates text."
        )
    if answers.no is None:
        raise EngineFailedError(
            "The model's score is the logit of one token, and SGLang gives probabilities only; "
            f"{_ELSEWHERE}."
        )
    return VectorModel(embeds=False, encoder_only=False, width=0, dimensions=(), answers=answers)


def _check_use(use: ModelUse, ours: str) -> None:
    """Check what the model's files say against what SGLang does."""
    if more := sorted({module.kind for module in use.further}):
        raise EngineFailedError(
            f"The model's modules.json has a layer {', '.join(more)} after pooling, which SGLang "
            f"would leave out, so its vectors would be wrong; {_ELSEWHERE}."
        )
    if use.pooling and use.pooling != ours:
        raise EngineFailedError(
            f"The model's vectors are pooled as {use.pooling!r}; SGLang pools models of this class "
            f"as {ours!r}, so its vectors would be wrong; {_ELSEWHERE}."
        )


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
