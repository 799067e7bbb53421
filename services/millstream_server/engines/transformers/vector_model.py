"""Models that embed or rank, run by transformers with all parts that their files name.

It is slower than the engines that serve language models, and takes what they get wrong: any
pooling, layers after it, heads of rankers, segment types.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millstream_server.embedding.embedder import EmbedderInfo
from millstream_server.embedding.model_files import (
    Answers,
    ModelUse,
    UnusableModulesError,
    dimensions_of,
    named_answers,
    read_use,
    separator_of,
)
from millstream_server.engines import torch_on_cpu
from millstream_server.engines.transformers.pooling import (
    GENERATES,
    Finish,
    Place,
    last_token,
    pooling,
)
from millstream_server.runtime.errors import EngineFailedError

_CLASSIFIES = "ForSequenceClassification"
_RUNNING = 64
_BATCH_TOKENS = 8192
"""Of a forward pass, padding included; one input may have more."""
_POSITIONS = 512
"""Of a model whose files don't say how many it has."""
_UNUSED_WEIGHTS = ("pooler.",)
"""Of BERT's own pooling, which sentence encoders don't keep."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VectorModelConfig:
    """Settings of a model that embeds or ranks."""

    model_path: Path
    device: str = "auto"
    dimensions: Sequence[int] = ()
    """To which vectors may be cut, instead of those that config.json names."""
    answers: Sequence[str] = ()
    """Of a generative model that ranks, instead of those that its files name."""
    context_length: int = 0
    """Most tokens of an input; 0: the model's."""
    max_running_requests: int = 0
    """Most inputs of a batch; 0: 64."""
    warm_up_timeout_s: float = 120.0


class VectorModel:
    """One model; every call comes from the same thread."""

    def __init__(self, config: VectorModelConfig) -> None:
        """Load nothing yet, import nothing of PyTorch."""
        self._config = config
        self._place: Place | None = None
        self._states: Callable[..., Any] | None = None
        self._finish: Finish | None = None
        self._fill = 0
        self._separator: int | None = None
        """The token behind which segment 1 begins; None: the model has no segments."""
        self._group_tokens = _BATCH_TOKENS

    def load(self) -> EmbedderInfo:
        """Read the weights.

        Raises:
            EngineFailedError: the files don't say how the model is used, or not all can be done.
        """
        path, chosen = self._config.model_path, self._config
        torch_on_cpu.prepare()
        torch: Any = importlib.import_module("torch")
        transformers: Any = importlib.import_module("transformers")
        device = torch_on_cpu.torch_device(chosen.device, torch)
        self._place = Place(torch, device, torch_on_cpu.torch_dtype("auto", device, torch))
        config = transformers.AutoConfig.from_pretrained(path, local_files_only=True)
        try:
            use = read_use(path)
            answers = named_answers(path, chosen.answers) or use.answers
            model, width = self._built(transformers, config, use, answers)
            dimensions = dimensions_of(config.to_dict(), width, chosen.dimensions)
        except UnusableModulesError as error:
            raise EngineFailedError(f"The model can't be used: {error}.") from error
        longest = _longest(config, model, chosen.context_length)
        self._group_tokens = max(_BATCH_TOKENS, longest)
        return EmbedderInfo(
            engine="transformers",
            engine_version=str(transformers.__version__),
            device=device,
            max_running_requests=chosen.max_running_requests or _RUNNING,
            embeds=width > 0,
            ranks=not width,
            width=width,
            dimensions=dimensions,
            max_input_tokens=longest,
            vocab_size=int(config.get_text_config().vocab_size),
            max_batch_tokens=self._group_tokens,
            answers=answers is not None,
        )

    def _built(
        self, transformers: Any, config: Any, use: ModelUse, answers: Answers | None
    ) -> tuple[Any, int]:
        """Load the model; return it and the width of its vectors, 0: it ranks."""
        assert self._place is not None  # noqa: S101 - `load` has set it
        named = next(iter(config.architectures or ()), "")
        self._fill = int(getattr(config, "pad_token_id", None) or 0)
        if answers is not None:
            if not named.endswith(GENERATES):
                raise EngineFailedError(
                    f"The model is a {named or 'model of no class'}: one that ranks by its answer "
                    "generates text."
                )
            model = self._loaded(transformers.AutoModelForCausalLM)
            self._states = model.base_model
            self._finish = _answering(self._place, config, model, answers)
            return model, 0
        if named.endswith(_CLASSIFIES):
            model = self._loaded(transformers.AutoModelForSequenceClassification)
            self._rank_with(config, model)
            return model, 0
        model = self._states = self._loaded(_class_of(transformers, config, named))
        self._finish, width = pooling(
            self._config.model_path,
            use,
            named,
            int(config.get_text_config().hidden_size),
            self._place,
        )
        return model, width

    def _loaded(self, cls: Any) -> Any:
        assert self._place is not None  # noqa: S101 - `load` has set it
        model, found = cls.from_pretrained(
            self._config.model_path,
            dtype=self._place.dtype,
            local_files_only=True,
            output_loading_info=True,
        )
        missing = [key for key in found["missing_keys"] if not key.startswith(_UNUSED_WEIGHTS)]
        if missing:
            raise EngineFailedError(
                f"The model's files lack {len(missing)} tensors, such as {min(missing)}."
            )
        return model.eval().to(self._place.device)

    def _rank_with(self, config: Any, model: Any) -> None:
        """Take the scores from a head with one label."""
        assert self._place is not None  # noqa: S101 - `load` has set it
        if config.num_labels != 1:
            raise EngineFailedError(
                f"The model has {config.num_labels} labels: it classifies. A model that ranks has "
                "1."
            )
        torch, head = self._place.torch, getattr(model, "score", None)
        if head is not None:  # of a decoder; its own forward looks for padding in the ids
            self._states = model.base_model
            self._finish = lambda states, mask: head(last_token(torch, states, mask))[:, 0]
            return
        if int(getattr(config, "type_vocab_size", None) or 1) > 1:
            self._separator = separator_of(self._config.model_path)
        self._states = lambda **inputs: model(**inputs).logits
        self._finish = lambda logits, _mask: logits[:, 0]

    # ---- batches ---------------------------------------------------------------------------------

    def run(
        self, inputs: Sequence[Sequence[int]], stopped: Callable[[], bool]
    ) -> NDArray[np.float32]:
        """Return results in the order of the inputs; of no use if it was ``stopped`` meanwhile."""
        found: dict[int, NDArray[np.float32]] = {}
        for group in self._groups(inputs):
            if stopped():
                break
            rows = self._forward([inputs[index] for index in group])
            found.update(zip(group, rows, strict=True))
        return np.array([found[index] for index in sorted(found)], np.float32)

    def _groups(self, inputs: Sequence[Sequence[int]]) -> Iterator[list[int]]:
        """Yield inputs of like length: a short one is padded to the longest beside it."""
        group: list[int] = []
        for index in sorted(range(len(inputs)), key=lambda index: len(inputs[index])):
            if group and len(inputs[index]) * (len(group) + 1) > self._group_tokens:
                yield group
                group = []
            group.append(index)
        if group:
            yield group

    def _forward(self, inputs: Sequence[Sequence[int]]) -> NDArray[np.float32]:
        assert self._states is not None  # noqa: S101 - it is loaded
        assert self._finish is not None  # noqa: S101 - likewise
        assert self._place is not None  # noqa: S101 - likewise
        torch = self._place.torch
        ids = torch.full((len(inputs), max(map(len, inputs))), self._fill, dtype=torch.long)
        mask, types = torch.zeros_like(ids), torch.zeros_like(ids)
        for row, tokens in enumerate(inputs):
            ids[row, : len(tokens)] = torch.tensor(list(tokens))
            mask[row, : len(tokens)] = 1
            if self._separator is not None and self._separator in tokens:
                types[row, list(tokens).index(self._separator) + 1 : len(tokens)] = 1
        given = {"input_ids": ids, "attention_mask": mask}
        if self._separator is not None:
            given["token_type_ids"] = types
        given = {name: tensor.to(self._place.device) for name, tensor in given.items()}
        with torch.inference_mode():
            made = self._states(**given)
            rows = self._finish(getattr(made, "last_hidden_state", made), given["attention_mask"])
        result: NDArray[np.float32] = rows.float().cpu().numpy()
        return result

    def close(self) -> None:
        """Drop the weights."""
        self._states = self._finish = None
        if self._place is not None and self._place.device == "cuda":
            self._place.torch.cuda.empty_cache()


def _answering(place: Place, config: Any, model: Any, answers: Answers) -> Finish:
    """Return what makes the difference of two tokens' logits of the last state."""
    torch, head = place.torch, model.get_output_embeddings()
    ids = [answers.yes] if answers.no is None else [answers.yes, answers.no]
    weight = head.weight[ids]
    bias = None if getattr(head, "bias", None) is None else head.bias[ids]
    cap = getattr(config.get_text_config(), "final_logit_softcapping", None)

    def finish(states: Any, mask: Any) -> Any:
        last = last_token(torch, states, mask)
        logits = torch.nn.functional.linear(last, weight, bias).float()
        if cap:
            logits = torch.tanh(logits / cap) * cap
        return logits[:, 0] if answers.no is None else logits[:, 0] - logits[:, 1]

    return finish


def _class_of(transformers: Any, config: Any, named: str) -> Any:
    """Return the class that makes states of tokens."""
    if not config.is_encoder_decoder:
        return transformers.AutoModel
    if named.endswith("EncoderModel") and hasattr(transformers, named):
        return getattr(transformers, named)
    raise EngineFailedError(f"The model is a {named}: one that embeds is an encoder or a decoder.")


def _longest(config: Any, model: Any, chosen: int) -> int:
    """Return the longest input that the model has positions for."""
    text = config.get_text_config()
    positions = int(getattr(text, "max_position_embeddings", None) or _POSITIONS)
    # RoBERTa's kind: the first token's position is behind that of padding.
    embeddings = getattr(model.base_model, "embeddings", None)
    if (padding := getattr(embeddings, "padding_idx", None)) is not None:
        positions -= int(padding) + 1
    return min(chosen, positions) if chosen else positions
