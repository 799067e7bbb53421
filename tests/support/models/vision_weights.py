"""Random weights of tiny vision-language models, under the names of published checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

VOCAB = 1024
HIDDEN = 64
FEED_FORWARD = 128
KV = 32
HEAD = 16
MERGED = HIDDEN * 4

# The usual 0.02 makes vision features too flat to tell pictures apart.
_SCALE = 0.15
_EMBEDDING_SCALE = 0.5
_GEMMA_SCALE = 0.3
_GEMMA_EMBEDDING_SCALE = 0.02  # else the text drowns the picture
_BIAS_SCALE = 0.05

Shapes = Iterator[tuple[str, tuple[int, ...]]]


def random_weights(family: str) -> dict[str, np.ndarray]:
    """Draw every tensor of a model; always the same."""
    random = np.random.default_rng(1)
    shapes, norm = _FAMILIES[family]
    weights = {}
    for name, shape in shapes():
        drawn = random.standard_normal(shape, dtype=np.float32)
        is_norm = len(shape) == 1 and name.endswith("weight")
        scale = _BIAS_SCALE if len(shape) == 1 else _scale(family, name)
        # Gemma's norms of text multiply by one more than their weight.
        base = norm(name) if is_norm else 0.0
        weights[name] = np.float32(base) + drawn * np.float32(scale)
    return weights


def _scale(family: str, name: str) -> float:
    if family == "gemma3":
        if "embed_tokens" in name:
            return _GEMMA_EMBEDDING_SCALE
        return _SCALE if "vision" in name else _GEMMA_SCALE
    return _EMBEDDING_SCALE if "embed_tokens" in name else _SCALE


def _linear(prefix: str, rows: int, columns: int) -> Shapes:
    yield f"{prefix}.weight", (rows, columns)
    yield f"{prefix}.bias", (rows,)


def _layer_norm(prefix: str, width: int = HIDDEN) -> Shapes:
    yield f"{prefix}.weight", (width,)
    yield f"{prefix}.bias", (width,)


def _text_layer(prefix: str, norms: tuple[str, ...], *, biased: bool, head_norms: bool) -> Shapes:
    for norm in norms:
        yield f"{prefix}.{norm}.weight", (HIDDEN,)
    for name, rows in (("q", HIDDEN), ("k", KV), ("v", KV)):
        yield f"{prefix}.self_attn.{name}_proj.weight", (rows, HIDDEN)
        if biased:
            yield f"{prefix}.self_attn.{name}_proj.bias", (rows,)
    yield f"{prefix}.self_attn.o_proj.weight", (HIDDEN, HIDDEN)
    if head_norms:
        yield f"{prefix}.self_attn.q_norm.weight", (HEAD,)
        yield f"{prefix}.self_attn.k_norm.weight", (HEAD,)
    yield f"{prefix}.mlp.gate_proj.weight", (FEED_FORWARD, HIDDEN)
    yield f"{prefix}.mlp.up_proj.weight", (FEED_FORWARD, HIDDEN)
    yield f"{prefix}.mlp.down_proj.weight", (HIDDEN, FEED_FORWARD)


def _text(prefix: str, layers: int, *, biased: bool, head_norms: bool, gemma: bool) -> Shapes:
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    if gemma:
        norms += ("pre_feedforward_layernorm", "post_feedforward_layernorm")
    yield f"{prefix}.embed_tokens.weight", (VOCAB, HIDDEN)
    for layer in range(layers):
        name = f"{prefix}.layers.{layer}"
        yield from _text_layer(name, norms, biased=biased, head_norms=head_norms)
    yield f"{prefix}.norm.weight", (HIDDEN,)
    if not gemma:
        yield "lm_head.weight", (VOCAB, HIDDEN)


def _qwen2_5() -> Shapes:
    yield from _text("model", 2, biased=True, head_norms=False, gemma=False)
    for layer in range(2):
        block = f"visual.blocks.{layer}"
        yield f"{block}.norm1.weight", (HIDDEN,)
        yield f"{block}.norm2.weight", (HIDDEN,)
        yield from _linear(f"{block}.attn.qkv", 3 * HIDDEN, HIDDEN)
        yield from _linear(f"{block}.attn.proj", HIDDEN, HIDDEN)
        yield from _linear(f"{block}.mlp.gate_proj", FEED_FORWARD, HIDDEN)
        yield from _linear(f"{block}.mlp.up_proj", FEED_FORWARD, HIDDEN)
        yield from _linear(f"{block}.mlp.down_proj", HIDDEN, FEED_FORWARD)
    yield "visual.patch_embed.proj.weight", (HIDDEN, 3, 2, 14, 14)
    yield "visual.merger.ln_q.weight", (HIDDEN,)
    yield from _linear("visual.merger.mlp.0", MERGED, MERGED)
    yield from _linear("visual.merger.mlp.2", HIDDEN, MERGED)


def _qwen3() -> Shapes:
    yield from _text("model.language_model", 4, biased=False, head_norms=True, gemma=False)
    for layer in range(4):
        block = f"model.visual.blocks.{layer}"
        yield from _layer_norm(f"{block}.norm1")
        yield from _layer_norm(f"{block}.norm2")
        yield from _linear(f"{block}.attn.qkv", 3 * HIDDEN, HIDDEN)
        yield from _linear(f"{block}.attn.proj", HIDDEN, HIDDEN)
        yield from _linear(f"{block}.mlp.linear_fc1", FEED_FORWARD, HIDDEN)
        yield from _linear(f"{block}.mlp.linear_fc2", HIDDEN, FEED_FORWARD)
    yield "model.visual.patch_embed.proj.weight", (HIDDEN, 3, 2, 16, 16)
    yield "model.visual.patch_embed.proj.bias", (HIDDEN,)
    yield "model.visual.pos_embed.weight", (64, HIDDEN)
    mergers = ["merger", *(f"deepstack_merger_list.{level}" for level in range(3))]
    for name in mergers:
        merger = f"model.visual.{name}"
        yield from _layer_norm(f"{merger}.norm", HIDDEN if name == "merger" else MERGED)
        yield from _linear(f"{merger}.linear_fc1", MERGED, MERGED)
        yield from _linear(f"{merger}.linear_fc2", HIDDEN, MERGED)


def _gemma3() -> Shapes:
    yield from _text("language_model.model", 2, biased=False, head_norms=True, gemma=True)
    yield "multi_modal_projector.mm_input_projection_weight", (HIDDEN, HIDDEN)
    yield "multi_modal_projector.mm_soft_emb_norm.weight", (HIDDEN,)
    tower = "vision_tower.vision_model"
    yield f"{tower}.embeddings.patch_embedding.weight", (HIDDEN, 3, 14, 14)
    yield f"{tower}.embeddings.patch_embedding.bias", (HIDDEN,)
    yield f"{tower}.embeddings.position_embedding.weight", (16, HIDDEN)
    for layer in range(2):
        block = f"{tower}.encoder.layers.{layer}"
        yield from _layer_norm(f"{block}.layer_norm1")
        yield from _layer_norm(f"{block}.layer_norm2")
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            yield from _linear(f"{block}.self_attn.{name}", HIDDEN, HIDDEN)
        yield from _linear(f"{block}.mlp.fc1", FEED_FORWARD, HIDDEN)
        yield from _linear(f"{block}.mlp.fc2", HIDDEN, FEED_FORWARD)
    yield from _layer_norm(f"{tower}.post_layernorm")


def _one(_name: str) -> float:
    return 1.0


def _gemma_norm(name: str) -> float:
    if "q_norm" in name:
        return 3.0  # sharp attention: a flat one repeats one token and hardly sees the picture
    return 1.0 if "vision" in name else 0.0


_FAMILIES: dict[str, tuple[Callable[[], Shapes], Callable[[str], float]]] = {
    "qwen2_5_vl": (_qwen2_5, _one),
    "qwen3_vl": (_qwen3, _one),
    "gemma3": (_gemma3, _gemma_norm),
}
