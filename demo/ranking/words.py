"""The tokenizer of both rankers: the same words, the same ids, other marks around them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

if TYPE_CHECKING:
    from pathlib import Path

SPECIAL = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")  # XLM-RoBERTa's order
BOS, PAD, EOS = 0, 1, 2


def train_words(texts: list[str], vocabulary: int) -> Tokenizer:
    """Trains a byte-level BPE in lower case; any text can be encoded, at worst byte by byte."""
    bpe = Tokenizer(models.BPE())
    bpe.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    # A space before the first word, so that it has the same id there as in the middle of a text.
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[AddedToken(mark, special=True, normalized=False) for mark in SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    return bpe


def for_embedding(words: Tokenizer) -> Tokenizer:
    """A copy that ends each text with the end token, whose place the engine reads."""
    copy = Tokenizer.from_str(words.to_str())
    copy.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A $B </s>", special_tokens=[("</s>", EOS)]
    )
    return copy


def for_pairs(words: Tokenizer) -> Tokenizer:
    """A copy that encodes a pair as XLM-RoBERTa does: `<s> query </s></s> passage </s>`."""
    copy = Tokenizer.from_str(words.to_str())
    copy.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>",
        pair="<s> $A </s> </s> $B </s>",
        special_tokens=[("<s>", BOS), ("</s>", EOS)],
    )
    return copy


def save_words(words: Tokenizer, folder: Path, longest: int) -> None:
    """Writes tokenizer.json and its settings; no text may have more than `longest` tokens."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words,
        bos_token="<s>",
        eos_token="</s>",
        sep_token="</s>",
        cls_token="<s>",
        pad_token="<pad>",
        unk_token="<unk>",
        mask_token="<mask>",
        model_max_length=longest,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.save_pretrained(folder)
    # The name under which every transformers release finds the class.
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
