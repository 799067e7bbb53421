"""Model directories with real tokenizers, trained on the spot: small, deterministic, no network.

Each function fills a directory with the files a model ships (tokenizer.json, tokenizer_config.json,
config.json, generation_config.json) and returns its path.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
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
