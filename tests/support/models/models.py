"""Models made on the spot: random weights, real tokenizers, the same every time, no download.

`make_random_model` makes one that an engine can run. The others fill a folder with the files of a
model that text needs (tokenizer.json, tokenizer_config.json, config.json, generation_config.json)
and return its path.
"""

from __future__ import annotations

import json
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np


import random
from typing import Any, Protocol

from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

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


def make_random_model(folder: Path, *, heads: int = _HIDDEN // _HEAD) -> Path:
    """Write a two-layer Llama and its tokenizer to ``folder``; the same weights every time.

    The files are written directly: no transformers, no PyTorch, under a second. vLLM's attention on
    a CPU needs heads of 32 numbers or more: ``heads=2``.
    """
    from safetensors.numpy import save_file  # noqa: PLC0415 - only tests with a model need it

    folder.mkdir(parents=True, exist_ok=True)
    head = _HIDDEN // heads
    config = _CONFIG | {"num_attention_heads": heads, "head_dim": head}
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    save_file(_weights(head), folder / "model.safetensors", metadata={"format": "pt"})
    save_tokenizer(folder)
    return folder


def _weights(head: int) -> dict[str, np.ndarray]:
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
                "self_attn.k_proj": matrix(_KV_HEADS * head, _HIDDEN),
                "self_attn.v_proj": matrix(_KV_HEADS * head, _HIDDEN),
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


def save_tokenizer(folder: Path) -> None:
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


CHATML = """\
{%- if tools %}<|im_start|>tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == "tool" and loop.first %}
{{- raise_exception("a tool message cannot come first") }}
{%- endif %}
{{- "<|im_start|>" + message.role + "\\n" + message.content }}
{%- for call in message.tool_calls or [] %}
{{- "<tool_call>" + call.function.name + " " }}
{{- (call.function.arguments | tojson) + "</tool_call>" }}
{%- endfor %}
{{- "<|im_end|>\\n" }}
{%- endfor %}
{%- if add_generation_prompt %}{{ "<|im_start|>assistant\\n" }}{% endif %}
"""

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

_SENTENCE = (
    "the quick brown fox jumps over a lazy dog hello world stream of tokens prefill decode answer "
    "question naïve café привет мир 你好 世界 日本語 テキスト नमस्ते e\u0301a\u0308 stop, end."
)
_WORDS = _SENTENCE.split()
_EMOJI = ["😀", "🎉", "👩‍👩‍👧", "🇫🇷"]


class HasTokenizer(Protocol):
    """A loaded model, or a stand-in for one."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The library's tokenizer."""
        ...


def sample_texts(count: int, *, seed: int = 7) -> list[str]:
    """Make texts with accents, combining marks, CJK and emoji."""
    chance = random.Random(seed)
    return [
        " ".join(chance.choices(_WORDS + _EMOJI, k=chance.randint(1, 12))) for _ in range(count)
    ]


def token_id(model: HasTokenizer, token: str) -> int:
    """Look up a token that must exist."""
    found = model.tokenizer.token_to_id(token)
    assert found is not None, token
    return found


def byte_level_model(path: Path, **files: dict[str, Any]) -> Path:
    """Make a byte-level BPE model with a ChatML template, as Qwen's are.

    ``files`` adds keys by file: ``config={"n_positions": 8}``; a value of None removes the key.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=440,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sample_texts(400), trainer)
    return _write(path, tokenizer, {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}, files)


def sentencepiece_model(path: Path, **files: dict[str, Any]) -> Path:
    """Make a BPE model with meta symbols and byte fallback that adds a BOS token, as Llama 2 is."""
    meta = pre_tokenizers.Metaspace(prepend_scheme="always")
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = meta
    # So few letters that emoji and most CJK have no token and fall back to bytes.
    trainer = trainers.BpeTrainer(vocab_size=220, limit_alphabet=40, show_progress=False)
    trained.train_from_iterator(sample_texts(400), trainer)
    model = json.loads(trained.to_str())["model"]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += sorted(model["vocab"], key=model["vocab"].get)
    tokenizer = Tokenizer(
        models.BPE(
            vocab={piece: index for index, piece in enumerate(pieces)},
            merges=[tuple(merge) for merge in model["merges"]],
            unk_token="<unk>",  # noqa: S106 (a token of text)
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.pre_tokenizer = meta
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1),
        ]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    tokens = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return _write(path, tokenizer, tokens, files)


def unigram_model(path: Path, **files: dict[str, Any]) -> Path:
    """Make a Unigram model that decodes with Metaspace alone, as T5 does."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=200,
        special_tokens=["<pad>", "</s>", "<unk>"],
        unk_token="<unk>",  # noqa: S106 (a token of text)
        show_progress=False,
    )
    tokenizer.train_from_iterator(sample_texts(400), trainer)
    return _write(path, tokenizer, {"eos_token": "</s>", "unk_token": "<unk>"}, files)


def wordpiece_model(path: Path, **files: dict[str, Any]) -> Path:
    """Make a WordPiece model, as BERT's are: its decoder is of neither generative family."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))  # noqa: S106 (a token of text)
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    trainer = trainers.WordPieceTrainer(
        vocab_size=300, special_tokens=["[UNK]", "[SEP]"], show_progress=False
    )
    tokenizer.train_from_iterator(sample_texts(400), trainer)
    return _write(path, tokenizer, {"sep_token": "[SEP]", "unk_token": "[UNK]"}, files)


def _write(
    path: Path,
    tokenizer: Tokenizer,
    special_tokens: dict[str, str],
    changes: dict[str, dict[str, Any]],
) -> Path:
    contents: dict[str, dict[str, Any]] = {
        "tokenizer_config": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "chat_template": CHATML,
            **special_tokens,
        },
        "config": {"model_type": "llama", "max_position_embeddings": 4096},
        "generation_config": {"temperature": 0.7, "top_p": 0.8, "top_k": 20},
    }
    path.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))
    for name, content in contents.items():
        merged = content | changes.get(name, {})
        kept = {key: value for key, value in merged.items() if value is not None}
        (path / f"{name}.json").write_text(json.dumps(kept), encoding="utf-8")
    return path
