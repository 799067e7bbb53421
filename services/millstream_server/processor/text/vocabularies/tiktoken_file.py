"""tiktoken's files: a token in base64 and its rank per line. They have neither pattern nor names.

Those are in the checkpoint's code, which isn't run here: so they are in a table, by `model_type`.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millstream_server.processor.text.vocabularies.byte_pairs import byte_pair_tokenizer
from millstream_server.processor.text.vocabularies.vocabulary import (
    BrokenVocabularyError,
    Vocabulary,
    put_bos_first,
)

_ENGLISH = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_NO_HAN = r"&&[^\p{Han}]"
_LINE = re.compile(rb"([A-Za-z0-9+/]+=*) (\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What the code of some models says of their tokenizer."""

    pattern: str
    special: tuple[str, ...] = ()
    """Special tokens behind the ranks, where tokenizer_config.json names none."""
    reserved: str = ""
    """The name of further ids; ``{0}`` is the id, ``{1}`` counts them from 0."""
    special_count: int = 0
    """How many ids follow the ranks."""
    names: tuple[tuple[str, str], ...] = ()
    """Which special token is which."""
    bos_first: bool = False


_KIMI = Family(
    pattern="|".join((
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}{_NO_HAN}]*[{_LOWER}{_NO_HAN}]+{_ENGLISH}?",
        rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}{_NO_HAN}]+[{_LOWER}{_NO_HAN}]*{_ENGLISH}?",
        r"\p{N}{1,3}",
        _REST,
    )),
    reserved="<|reserved_token_{0}|>",
    special_count=256,
)  # fmt: skip
_QWEN = Family(
    pattern=rf"{_ENGLISH}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}",
    special=("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    reserved="<|extra_{1}|>",
    special_count=208,
    names=(("eos_token", "<|endoftext|>"),),
)
_LLAMA3 = Family(
    pattern=rf"{_ENGLISH}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}",
    special=(
        *("<|begin_of_text|>", "<|end_of_text|>"),
        *("<|reserved_special_token_0|>", "<|reserved_special_token_1|>"),
        *("<|finetune_right_pad_id|>", "<|step_id|>", "<|start_header_id|>"),
        *("<|end_header_id|>", "<|eom_id|>", "<|eot_id|>", "<|python_tag|>", "<|image|>"),
    ),
    reserved="<|reserved_special_token_{1}|>",
    special_count=256,
    names=(("bos_token", "<|begin_of_text|>"), ("eos_token", "<|eot_id|>")),
    bos_first=True,
)
FAMILIES: Mapping[str, Family] = {
    **dict.fromkeys(("kimi_k2", "kimi_k25", "kimi_k3", "kimi_vl", "kimi_linear"), _KIMI),
    "qwen": _QWEN,
    **dict.fromkeys(("llama", "mllama"), _LLAMA3),
}
"""By `model_type` of config.json."""


def is_tiktoken(file: Path) -> bool:
    """Return whether a file is of this kind: its name may be a sentencepiece file's too."""
    with file.open("rb") as opened:
        return _LINE.fullmatch(opened.readline(4096).rstrip()) is not None


def read_tiktoken(file: Path, config: Mapping[str, Any], names: Mapping[str, Any]) -> Vocabulary:
    """Read a file; ``config`` is config.json, ``names`` tokenizer_config.json.

    Raises:
        BrokenVocabularyError: it is broken, or nothing is known of the model's pattern.
    """
    model_type = config.get("model_type")
    family = FAMILIES.get(str(model_type))
    if family is None:
        raise BrokenVocabularyError(
            "it needs the pattern of its model, which isn't known here for the "
            f"model_type {model_type!r} of config.json, and code of a checkpoint isn't run"
        )
    ranks = _ranks(file)
    special = _special(family, len(ranks), names)
    tokenizer = byte_pair_tokenizer(ranks, family.pattern, special)
    found = dict(family.names)
    if family.bos_first:
        put_bos_first(tokenizer, found["bos_token"])
    return Vocabulary(tokenizer=tokenizer, special_tokens=found)


def _ranks(file: Path) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(file.read_bytes().splitlines(), start=1):
        if not line:
            continue
        match = _LINE.fullmatch(line)
        try:
            token = base64.b64decode(match[1], validate=True) if match else b""
        except binascii.Error:
            token = b""
        if match is None or not token:
            raise BrokenVocabularyError(f"line {number} is no token in base64 with its rank")
        ranks[token] = int(match[2])
    return ranks


def _special(family: Family, first: int, names: Mapping[str, Any]) -> dict[str, int]:
    """Return the special tokens: those that tokenizer_config.json names, and the family's."""
    given = names.get("added_tokens_decoder")
    texts = dict(enumerate(family.special, first))
    if isinstance(given, dict):
        texts |= {int(token_id): token["content"] for token_id, token in given.items()}
    counted = 2 if family is _LLAMA3 else 0
    for token_id in range(first, first + family.special_count):
        if token_id not in texts:
            texts[token_id] = family.reserved.format(token_id, counted)
            counted += 1
    return {text: token_id for token_id, text in texts.items()}
