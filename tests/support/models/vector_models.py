"""Embedding models and cross-encoders made on the spot: random weights, the same every time.

They take token ids; there is no tokenizer in their folders.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

Kind = Literal["qwen3", "bert", "xlmr", "xlmr_ranker", "bert_ranker"]

WIDTH = 64
VOCAB_SIZE = 1024
POSITIONS = 128
DIMENSIONS = (16, 32, 64)
LONGEST: dict[Kind, int] = {
    "qwen3": 511,
    "bert": POSITIONS - 1,
    "xlmr": POSITIONS - 4,
    "xlmr_ranker": POSITIONS - 4,
    "bert_ranker": POSITIONS - 1,
}
"""Most tokens of an input."""

_HEAD = 16
_FEED_FORWARD = 128
_LAYERS = 2
_PAD = 3
_SCALE = 0.3
"""With less, all inputs have nearly the same vector."""

_QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "num_key_value_heads": 2,
    "head_dim": _HEAD,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": True,
    "matryoshka_dimensions": list(DIMENSIONS),
}
_BERT = {
    "architectures": ["BertModel"],
    "model_type": "bert",
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-5,
    "max_position_embeddings": POSITIONS,
    "type_vocab_size": 2,
    "pad_token_id": _PAD,
}
_XLMR = _BERT | {
    "architectures": ["XLMRobertaModel"],
    "model_type": "xlm-roberta",
    "type_vocab_size": 1,
}
_ONE_LABEL = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
_CONFIGS: dict[Kind, dict[str, Any]] = {
    "qwen3": _QWEN3,
    "bert": _BERT,
    "xlmr": _XLMR,
    "xlmr_ranker": _XLMR | {"architectures": ["XLMRobertaForSequenceClassification"]} | _ONE_LABEL,
    "bert_ranker": _BERT
    | {"architectures": ["BertForSequenceClassification"], "type_vocab_size": 1}
    | _ONE_LABEL,
}


def make_vector_model(folder: Path, kind: Kind, *, head: int = _HEAD, **changes: Any) -> Path:
    """Write a model's files; ``changes`` are of its config.json, None removes a key.

    ``head``: the width of an attention head.
    """
    from safetensors.numpy import save_file  # noqa: PLC0415 - only tests with a model need it

    config = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": WIDTH,
        "intermediate_size": _FEED_FORWARD,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": WIDTH // head,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "dtype": "float32",
        **_CONFIGS[kind],
        **({"head_dim": head} if kind == "qwen3" else {}),
        **changes,
    }
    folder.mkdir(parents=True, exist_ok=True)
    kept = {key: value for key, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(kept, indent=1))
    weights = _Weights()
    if kind == "qwen3":
        weights.add_qwen3(head)
    else:
        prefix = {"xlmr_ranker": "roberta.", "bert_ranker": "bert."}.get(kind, "")
        weights.add_encoder(prefix, types=config["type_vocab_size"])
    if kind == "xlmr_ranker":
        weights.linear("classifier.dense", WIDTH, WIDTH)
        weights.linear("classifier.out_proj", 1, WIDTH)
    if kind == "bert_ranker":
        weights.linear("bert.pooler.dense", WIDTH, WIDTH)
        weights.linear("classifier", 1, WIDTH)
    save_file(weights.found, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


class _Weights:
    """Tensors by name, drawn one after another."""

    def __init__(self) -> None:
        self.found: dict[str, np.ndarray] = {}
        self._random = np.random.default_rng(0)

    def matrix(self, name: str, rows: int, columns: int) -> None:
        drawn = self._random.standard_normal((rows, columns), dtype=np.float32)
        self.found[f"{name}.weight"] = drawn * np.float32(_SCALE)

    def linear(self, name: str, rows: int, columns: int) -> None:
        self.matrix(name, rows, columns)
        drawn = self._random.standard_normal(rows, dtype=np.float32)
        self.found[f"{name}.bias"] = drawn * np.float32(_SCALE)

    def norm(self, name: str, size: int = WIDTH, *, bias: bool = False) -> None:
        self.found[f"{name}.weight"] = np.ones(size, dtype=np.float32)
        if bias:
            self.found[f"{name}.bias"] = np.zeros(size, dtype=np.float32)

    def add_qwen3(self, head: int) -> None:
        self.matrix("model.embed_tokens", VOCAB_SIZE, WIDTH)
        for number in range(_LAYERS):
            layer = f"model.layers.{number}"
            for norm in ("input_layernorm", "post_attention_layernorm"):
                self.norm(f"{layer}.{norm}")
            for norm in ("q_norm", "k_norm"):
                self.norm(f"{layer}.self_attn.{norm}", head)
            for name, rows in (("q", WIDTH), ("k", 2 * head), ("v", 2 * head), ("o", WIDTH)):
                self.matrix(f"{layer}.self_attn.{name}_proj", rows, WIDTH)
            self.matrix(f"{layer}.mlp.gate_proj", _FEED_FORWARD, WIDTH)
            self.matrix(f"{layer}.mlp.up_proj", _FEED_FORWARD, WIDTH)
            self.matrix(f"{layer}.mlp.down_proj", WIDTH, _FEED_FORWARD)
        self.norm("model.norm")

    def add_encoder(self, prefix: str, *, types: int) -> None:
        for name, rows in (("word", VOCAB_SIZE), ("position", POSITIONS), ("token_type", types)):
            self.matrix(f"{prefix}embeddings.{name}_embeddings", rows, WIDTH)
        self.norm(f"{prefix}embeddings.LayerNorm", bias=True)
        for number in range(_LAYERS):
            layer = f"{prefix}encoder.layer.{number}"
            for name in ("query", "key", "value"):
                self.linear(f"{layer}.attention.self.{name}", WIDTH, WIDTH)
            self.linear(f"{layer}.attention.output.dense", WIDTH, WIDTH)
            self.norm(f"{layer}.attention.output.LayerNorm", bias=True)
            self.linear(f"{layer}.intermediate.dense", _FEED_FORWARD, WIDTH)
            self.linear(f"{layer}.output.dense", WIDTH, _FEED_FORWARD)
            self.norm(f"{layer}.output.LayerNorm", bias=True)


def by_transformers(folder: Path, kind: Kind, inputs: Sequence[Sequence[int]]) -> np.ndarray:
    """Return the vectors of length 1, or the logits, that transformers makes."""
    import torch  # noqa: PLC0415 - only tests with a model need it
    import transformers  # noqa: PLC0415

    ranks = kind.endswith("ranker")
    loader = transformers.AutoModelForSequenceClassification if ranks else transformers.AutoModel
    model = loader.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    rows = []
    with torch.inference_mode():
        for ids in inputs:
            made = model(input_ids=torch.tensor([list(ids)]))
            if ranks:
                rows.append(made.logits[0, 0])
                continue
            row = made.last_hidden_state[0, -1 if kind == "qwen3" else 0]
            rows.append(row / row.norm())
    return np.asarray(torch.stack(rows))
