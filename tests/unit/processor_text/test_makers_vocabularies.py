"""Vocabularies that aren't a tokenizer.json: the same ids as their makers' packages."""

from __future__ import annotations

import base64
import functools
import itertools
import json
import subprocess
import sys
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import tiktoken
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from millstream_server.processor.text.detokenizer import detokenizer
from millstream_server.processor.text.tokenizer import TextModel
from tests.support.models.models import CHATML, sample_texts
from tests.support.models.odd_texts import odd_texts

_TEXTS = 10_000
_KIMI_PATTERN = (
    r"[\p{Han}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""As Moonshot's tokenization_kimi.py has it."""
_LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""As Meta's tokenizer.py has it."""
_TEKKEN_PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+"


@functools.cache
def _ranks() -> Mapping[bytes, int]:
    """Learn tokens as a tiktoken file has them: all bytes, then longer and longer ones."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=900, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([*sample_texts(400), *odd_texts(400)], trainer)
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (value for value in range(256) if value not in printable)
    byte_of = {chr(0x100 + at): value for at, value in enumerate(others)}
    joined = [bytes(byte_of.get(c, ord(c)) for c in first + second) for first, second in merges]
    tokens = [*(bytes([value]) for value in range(256)), *joined]
    return {token: rank for rank, token in enumerate(dict.fromkeys(tokens))}


def _write(folder: Path, **files: Any) -> Path:
    for name, content in files.items():
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        (folder / name.replace("__", ".")).write_bytes(data)
    return folder


def _tiktoken_file() -> bytes:
    lines = (b"%s %d\n" % (base64.b64encode(token), rank) for token, rank in _ranks().items())
    return b"".join(lines)


Encode = Callable[[str], Sequence[int]]


def _kimi(folder: Path) -> Encode:
    names = {len(_ranks()): "[BOS]", len(_ranks()) + 1: "[EOS]", len(_ranks()) + 3: "<|im_end|>"}
    added = {str(token_id): {"content": name, "special": True} for token_id, name in names.items()}
    config = {
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        "added_tokens_decoder": added,
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "chat_template": CHATML,
    }
    _write(folder, tiktoken__model=_tiktoken_file(), tokenizer_config__json=config)
    _write(folder, config__json={"model_type": "kimi_k2"})
    (folder / "tokenization_kimi.py").write_text("raise SystemExit('never run')")
    found = tiktoken.Encoding(
        "kimi", pat_str=_KIMI_PATTERN, mergeable_ranks=dict(_ranks()), special_tokens={}
    )
    return lambda text: found.encode(text, disallowed_special=())


def _qwen(folder: Path) -> Encode:
    config = {"model_type": "qwen"}
    _write(folder, qwen__tiktoken=_tiktoken_file(), config__json=config)
    pattern = (
        r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"""
        r"""| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
    )
    found = tiktoken.Encoding(
        "qwen", pat_str=pattern, mergeable_ranks=dict(_ranks()), special_tokens={}
    )
    return lambda text: found.encode(text, disallowed_special=())


def _llama3(folder: Path) -> Encode:
    """Its file has the name of a sentencepiece file."""
    _write(folder, tokenizer__model=_tiktoken_file(), config__json={"model_type": "llama"})
    found = tiktoken.Encoding(
        "llama3", pat_str=_LLAMA3_PATTERN, mergeable_ranks=dict(_ranks()), special_tokens={}
    )
    return lambda text: found.encode(text, disallowed_special=())


def _tekken(folder: Path) -> Encode:
    """Mistral-common encodes with tiktoken too; special tokens come first."""
    vocabulary = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode()}
        for token, rank in _ranks().items()
    ]
    kept = len(_ranks()) - 100
    config = {
        "pattern": _TEKKEN_PATTERN,
        "default_vocab_size": kept + 32,
        "default_num_special_tokens": 32,
        "version": "v7",
    }
    _write(folder, tekken__json={"config": config, "vocab": vocabulary})
    ranks = {token: rank for token, rank in _ranks().items() if rank < kept}
    found = tiktoken.Encoding(
        "tekken", pat_str=_TEKKEN_PATTERN, mergeable_ranks=ranks, special_tokens={}
    )
    return lambda text: [each + 32 for each in found.encode(text, disallowed_special=())]


def _sentencepiece(folder: Path, **how: Any) -> Encode:
    """Train a model and encode `odd_texts` with it, in a process of its own.

    SWIG's types warn when they are made: as an error, as here, that ends the process later.
    """
    texts = list(odd_texts(_TEXTS))
    work = {"how": how, "folder": str(folder), "lines": sample_texts(2000), "texts": texts}
    done = subprocess.run(
        [sys.executable, "-c", _WITH_SENTENCEPIECE],
        input=json.dumps(work),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=100,
    )
    ids: dict[str, list[int]] = dict(zip(texts, json.loads(done.stdout), strict=True))
    return ids.__getitem__


_WITH_SENTENCEPIECE = """
import json, sys, sentencepiece
work = json.load(sys.stdin)
prefix = work["folder"] + "/tokenizer"
sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=iter(work["lines"]), model_prefix=prefix, character_coverage=0.98,
    minloglevel=2, **work["how"],
)
encode = sentencepiece.SentencePieceProcessor(model_file=prefix + ".model").encode
json.dump([encode(text) for text in work["texts"]], sys.stdout)
"""


def _llama2(folder: Path) -> Encode:
    """As Llama 2, Mistral and InternLM."""
    return _sentencepiece(
        folder,
        model_type="bpe",
        vocab_size=360,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        split_digits=True,
    )


def _gemma(folder: Path) -> Encode:
    """No blank in front, and pieces that are found before all others, blanks among them."""
    return _sentencepiece(
        folder,
        model_type="bpe",
        vocab_size=360,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=False,
        user_defined_symbols=["<start_of_turn>", "\u2581\u2581", "\n\n"],
    )


def _unigram(folder: Path) -> Encode:
    """Of the likeliest pieces, and blanks made one."""
    return _sentencepiece(
        folder,
        model_type="unigram",
        vocab_size=360,
        byte_fallback=True,
        normalization_rule_name="identity",
    )


def _nfkc(folder: Path) -> Encode:
    """As T5 and XLM-RoBERTa: texts are normalized, and what has no piece is unknown."""
    return _sentencepiece(folder, model_type="unigram", vocab_size=120)


def _composes(text: str) -> bool:
    """Whether a mark follows a letter that has one already.

    The tokenizers library normalizes the two together, sentencepiece each alone.
    """
    pairs = itertools.pairwise(text)
    return any(unicodedata.combining(mark) and not letter.isascii() for letter, mark in pairs)


_KINDS = [_kimi, _qwen, _llama3, _tekken, _llama2, _gemma, _unigram, _nfkc]


@pytest.mark.parametrize("kind", _KINDS)
def test_ids_are_those_of_the_makers_package_and_streamed_text_is_the_whole_text(
    tmp_path: Path, kind: Callable[[Path], Encode]
) -> None:
    encode = kind(tmp_path)
    model = TextModel.load(tmp_path)
    assert model.pieces is not None
    for text in odd_texts(_TEXTS):
        ids = list(model.encode(text, add_special_tokens=False))
        if kind is not _nfkc or not _composes(text):
            assert ids == list(encode(text)), text
        stream = detokenizer(model, skip_special_tokens=True)
        streamed = "".join(stream.push([token_id]) for token_id in ids) + stream.flush()
        assert streamed == model.decode(ids)
        if kind not in {_unigram, _nfkc}:  # blanks are gone
            assert streamed == text
