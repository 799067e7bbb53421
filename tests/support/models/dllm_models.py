"""A diffusion language model made on the spot: SDAR's architecture, random weights.

SGLang knows SDAR's mask token by its number, so the vocabulary must go beyond that; the tokenizer
is that of the other random models, and no token above its own is ever the likeliest.
"""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.models.models import VOCAB_SIZE as TOKENIZER_SIZE
from tests.support.models.models import save_tokenizer

VOCAB_SIZE = 151_680
CONTEXT_LENGTH = 512
BLOCK_TOKENS = 4
"""What SGLang denoises at once of SDAR models."""

_HIDDEN = 32
_HEAD = 16
_LAYERS = 2
_FEED_FORWARD = 64
_CONFIG = {
    "architectures": ["SDARForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": _HIDDEN,
    "intermediate_size": _FEED_FORWARD,
    "num_hidden_layers": _LAYERS,
    "num_attention_heads": _HIDDEN // _HEAD,
    "num_key_value_heads": 1,
    "head_dim": _HEAD,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": CONTEXT_LENGTH,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 3,
    "tie_word_embeddings": False,
    "fuse_cross_entropy": False,
    "dtype": "float32",
}


def make_random_dllm(folder: Path) -> Path:
    """Write the model and its tokenizer to ``folder``: 39 MB, the same every time."""
    import numpy as np  # noqa: PLC0415 - only tests with a model need them
    from safetensors.numpy import save_file  # noqa: PLC0415

    drawn = np.random.default_rng(0)

    def matrix(rows: int, columns: int) -> np.ndarray:
        return drawn.standard_normal((rows, columns), dtype=np.float32) * np.float32(0.5)

    shapes = {
        "self_attn.q_proj": (_HIDDEN, _HIDDEN),
        "self_attn.k_proj": (_HEAD, _HIDDEN),
        "self_attn.v_proj": (_HEAD, _HIDDEN),
        "self_attn.o_proj": (_HIDDEN, _HIDDEN),
        "mlp.gate_proj": (_FEED_FORWARD, _HIDDEN),
        "mlp.up_proj": (_FEED_FORWARD, _HIDDEN),
        "mlp.down_proj": (_HIDDEN, _FEED_FORWARD),
    }
    norms = {
        "input_layernorm": _HIDDEN,
        "post_attention_layernorm": _HIDDEN,
        "self_attn.q_norm": _HEAD,
        "self_attn.k_norm": _HEAD,
    }
    head = np.zeros((VOCAB_SIZE, _HIDDEN), dtype=np.float32)
    head[:TOKENIZER_SIZE] = matrix(TOKENIZER_SIZE, _HIDDEN)
    weights = {
        "model.embed_tokens.weight": matrix(VOCAB_SIZE, _HIDDEN),
        "model.norm.weight": np.ones(_HIDDEN, dtype=np.float32),
        "lm_head.weight": head,
    }
    for layer in range(_LAYERS):
        at = f"model.layers.{layer}."
        weights |= {f"{at}{name}.weight": matrix(*shape) for name, shape in shapes.items()}
        for name, size in norms.items():
            weights[f"{at}{name}.weight"] = np.ones(size, dtype=np.float32)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(_CONFIG, indent=1))
    save_tokenizer(folder)
    return folder
