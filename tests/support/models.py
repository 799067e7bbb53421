"""Tiny models made on the spot: random weights, a real tokenizer, no download."""

from __future__ import annotations

import json
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

VOCAB_SIZE = 1024
CONTEXT_LENGTH = 2048
EOS_TOKEN_ID = 2

_HIDDEN = 64
_HEAD = 16
_KV_HEADS = 2
_FEED_FORWARD = 128
_LAYERS = 2
# With the usual 0.02 a model this small repeats one token for ever.
_WEIGHT_SCALE = 0.5

_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": _HIDDEN,
    "intermediate_size": _FEED_FORWARD,
    "num_hidden_layers": _LAYERS,
    "num_attention_heads": _HIDDEN // _HEAD,
    "num_key_value_heads": _KV_HEADS,
    "head_dim": _HEAD,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": CONTEXT_LENGTH,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "bos_token_id": 1,
    "eos_token_id": EOS_TOKEN_ID,
    "pad_token_id": 3,
    "tie_word_embeddings": False,
    "dtype": "float32",
}
_SPECIAL_TOKENS = ("<unk>", "<s>", "</s>", "<pad>", "<|im_start|>", "<|im_end|>")
_CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "unk_token": "<unk>",
    "bos_token": "<s>",
    "eos_token": "</s>",
    "pad_token": "<pad>",
    "model_max_length": CONTEXT_LENGTH,
    "chat_template": _CHAT_TEMPLATE,
}
_CORPUS_FILES = 60


def make_random_model(folder: Path) -> Path:
    """Write a two-layer Llama and its tokenizer to ``folder``; the same weights every time.

    The files are written directly: no transformers, no PyTorch, under a second.
    """
    from safetensors.numpy import save_file  # noqa: PLC0415 - only tests with a model need it

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(_CONFIG, indent=1))
    save_file(_weights(), folder / "model.safetensors", metadata={"format": "pt"})
    _save_tokenizer(folder)
    return folder


def _weights() -> dict[str, np.ndarray]:
    import numpy as np  # noqa: PLC0415

    random = np.random.default_rng(0)

    def matrix(rows: int, columns: int) -> np.ndarray:
        drawn = random.standard_normal((rows, columns), dtype=np.float32)
        return drawn * np.float32(_WEIGHT_SCALE)

    ones = np.ones(_HIDDEN, dtype=np.float32)
    weights = {"model.embed_tokens.weight": matrix(VOCAB_SIZE, _HIDDEN)}
    for layer in range(_LAYERS):
        weights |= {
            f"model.layers.{layer}.{name}.weight": value
            for name, value in {
                "input_layernorm": ones.copy(),
                "self_attn.q_proj": matrix(_HIDDEN, _HIDDEN),
                "self_attn.k_proj": matrix(_KV_HEADS * _HEAD, _HIDDEN),
                "self_attn.v_proj": matrix(_KV_HEADS * _HEAD, _HIDDEN),
                "self_attn.o_proj": matrix(_HIDDEN, _HIDDEN),
                "post_attention_layernorm": ones.copy(),
                "mlp.gate_proj": matrix(_FEED_FORWARD, _HIDDEN),
                "mlp.up_proj": matrix(_FEED_FORWARD, _HIDDEN),
                "mlp.down_proj": matrix(_HIDDEN, _FEED_FORWARD),
            }.items()
        }
    weights |= {
        "model.norm.weight": ones.copy(),
        "lm_head.weight": matrix(VOCAB_SIZE, _HIDDEN),
    }
    return weights


def _save_tokenizer(folder: Path) -> None:
    """Train byte-level BPE on the standard library's sources, so that any text round-trips."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers  # noqa: PLC0415

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(_SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:_CORPUS_FILES]
    tokenizer.train([str(source) for source in sources], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = json.dumps(_TOKENIZER_CONFIG, indent=1)
    (folder / "tokenizer_config.json").write_text(config)
