"""Embedding models and cross-encoders made on the spot: random weights, the same every time.

They take token ids; there is no tokenizer in their folders.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

Kind = Literal[
    "qwen3",
    "qwen3_answers",
    "qwen3_logit",
    "qwen3_head",
    "bert",
    "bert_mean",
    "bert_ranker",
    "bert_segments",
    "xlmr",
    "xlmr_ranker",
]
RANKERS = ("ranker", "segments", "answers", "logit", "head")
"""How the names of kinds end that rank."""
YES, NO = 9, 7
"""Answers of a generative model that ranks."""
SEPARATOR = 7
"""Behind it the second segment begins."""

WIDTH = 64
VOCAB_SIZE = 1024
POSITIONS = 128
DIMENSIONS = (16, 32, 64)
LONGEST: dict[Kind, int] = {
    "qwen3": 511,
    "qwen3_answers": 505,
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
    "qwen3_answers": _QWEN3,
    "qwen3_logit": _QWEN3,
    "qwen3_head": _QWEN3 | {"architectures": ["Qwen3ForSequenceClassification"]} | _ONE_LABEL,
    "bert_mean": _BERT,
    "bert_segments": _BERT | {"architectures": ["BertForSequenceClassification"]} | _ONE_LABEL,
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
        **({"head_dim": head} if kind.startswith("qwen3") else {}),
        **changes,
    }
    folder.mkdir(parents=True, exist_ok=True)
    kept = {key: value for key, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(kept, indent=1))
    weights = _Weights()
    if kind.startswith("qwen3"):
        weights.add_qwen3(head)
    else:
        prefix = {"xlmr_ranker": "roberta."}.get(kind, "bert." if is_ranker(kind) else "")
        weights.add_encoder(prefix, types=config["type_vocab_size"])
    if kind == "qwen3_head":
        weights.matrix("score", 1, WIDTH)
    if kind == "xlmr_ranker":
        weights.linear("classifier.dense", WIDTH, WIDTH)
        weights.linear("classifier.out_proj", 1, WIDTH)
    if kind in ("bert_ranker", "bert_segments"):
        weights.linear("bert.pooler.dense", WIDTH, WIDTH)
        weights.linear("classifier", 1, WIDTH)
    save_file(weights.found, folder / "model.safetensors", metadata={"format": "pt"})
    _say_use(folder, kind)
    return folder


def is_ranker(kind: str) -> bool:
    """Return whether such a model ranks."""
    return kind.endswith(RANKERS)


def _say_use(folder: Path, kind: Kind) -> None:
    """Write what sentence-transformers would, where the model's class doesn't say all."""
    from safetensors.numpy import save_file  # noqa: PLC0415 - only tests with a model need it

    if kind == "bert_segments":
        token = {"added_tokens": [{"id": SEPARATOR, "content": "[SEP]"}]}
        (folder / "tokenizer.json").write_text(json.dumps(token))
    if kind in ("qwen3_answers", "qwen3_logit"):
        no = NO if kind == "qwen3_answers" else None
        write_modules(folder, LogitScore={"true_token_id": YES, "false_token_id": no})
    if kind == "bert_mean":
        dense = {"activation_function": "torch.nn.modules.activation.Tanh"}
        write_modules(folder, Pooling={"pooling_mode_mean_tokens": True}, Dense=dense, Normalize={})
        layer = _Weights()
        layer.linear("linear", WIDTH, WIDTH)
        save_file(layer.found, folder / "2_Dense" / "model.safetensors")


def write_modules(folder: Path, **modules: Any) -> None:
    """Write modules.json and the settings of each part behind the transformer."""
    listed = [{"path": "", "type": "sentence_transformers.models.Transformer"}]
    for number, (name, config) in enumerate(modules.items(), 1):
        listed.append({"path": f"{number}_{name}", "type": f"sentence_transformers.models.{name}"})
        (folder / f"{number}_{name}").mkdir()
        (folder / f"{number}_{name}" / "config.json").write_text(json.dumps(config))
    (folder / "modules.json").write_text(json.dumps(listed))


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


def by_transformers(
    folder: Path, kind: Kind, inputs: Sequence[Sequence[int]], *, unit: bool = True
) -> np.ndarray:
    """Return the vectors, of length 1 or (not ``unit``) as they are, or the logits.

    One input at a time, without padding.
    """
    import torch  # noqa: PLC0415 - only tests with a model need it
    import transformers  # noqa: PLC0415

    loader = transformers.AutoModel
    if kind in ("qwen3_answers", "qwen3_logit"):
        loader = transformers.AutoModelForCausalLM
    elif is_ranker(kind):
        loader = transformers.AutoModelForSequenceClassification
    model = loader.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    rows = []
    with torch.inference_mode():
        for ids in inputs:
            given = {"input_ids": torch.tensor([list(ids)])}
            if kind == "bert_segments":
                second = (given["input_ids"] == SEPARATOR).cumsum(1) > 0
                types = torch.cat([torch.zeros(1, 1, dtype=torch.bool), second[:, :-1]], dim=1)
                given["token_type_ids"] = types.long()
            made = model(**given)
            if kind == "qwen3_answers":
                rows.append(made.logits[0, -1, YES] - made.logits[0, -1, NO])
            elif kind == "qwen3_logit":
                rows.append(made.logits[0, -1, YES])
            elif is_ranker(kind):
                rows.append(made.logits[0, 0])
            else:
                row = _pooled(folder, kind, made.last_hidden_state[0])
                rows.append(row / row.norm() if unit else row)
    return np.asarray(torch.stack(rows))


def _pooled(folder: Path, kind: Kind, states: Any) -> Any:
    if kind != "bert_mean":
        return states[-1 if kind == "qwen3" else 0]
    from safetensors.torch import load_file  # noqa: PLC0415 - only tests with a model need it

    layer = load_file(folder / "2_Dense" / "model.safetensors")
    return (layer["linear.weight"] @ states.mean(0) + layer["linear.bias"]).tanh()
