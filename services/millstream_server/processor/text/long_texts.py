"""Cuts long texts where the tokenizer cuts them too, so that they can be tokenized in parts.

The tokenizers library takes 200 to 300 bytes for each character of a text that it encodes. Parts
have the same ids as the whole text where the tokenizer's first steps can't join what is on both
sides of a cut. The cut here is between an ASCII letter and a space with another letter behind it:
the patterns below end a match behind such a letter and look at nothing before a match; NFC changes
neither; and no added token reaches over it. For other tokenizers texts are not cut.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

PART_CHARS = 1 << 16
"""About a part's length; it takes 25 ms, and 12 MB."""
_CUT = re.compile("[A-Za-z](?= [A-Za-z])")
_PATTERNS = frozenset(
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
    rf"|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    for digits in ("", "{1,3}")
)
"""How Qwen's models and Llama 3 and later split a text. ByteLevel has GPT-2's pattern built in."""


@dataclass(frozen=True, slots=True)
class Frame:
    """The special tokens that a tokenizer sets around each text."""

    before: tuple[int, ...]
    behind: tuple[int, ...]


def frame_of(tokenizer: Tokenizer) -> Frame | None:
    """Return what is around each text; None: the tokenizer's texts can't be cut."""
    if not _can_be_cut(json.loads(tokenizer.to_str())):
        return None
    bare = tokenizer.encode("a", add_special_tokens=False).ids
    framed = tokenizer.encode("a", add_special_tokens=True).ids
    for at in range(len(framed) - len(bare) + 1):
        if framed[at : at + len(bare)] == bare:
            return Frame(tuple(framed[:at]), tuple(framed[at + len(bare) :]))
    return None


def parts_of(text: str) -> Iterator[str]:
    """Cut a text into parts of about `PART_CHARS`, longer where no cut can be made."""
    start = 0
    while (cut := _CUT.search(text, start + PART_CHARS)) is not None:
        yield text[start : cut.end()]
        start = cut.end()
    yield text[start:]


def _can_be_cut(tokenizer: dict[str, Any]) -> bool:
    normalizer, splits = tokenizer["normalizer"], tokenizer["pre_tokenizer"]
    if normalizer is not None and normalizer["type"] != "NFC":
        return False
    if any(_may_reach_over(token) for token in tokenizer["added_tokens"]):
        return False
    if splits is None:
        return False
    steps = splits["pretokenizers"] if splits["type"] == "Sequence" else [splits]
    *first, last = steps
    if last["type"] != "ByteLevel":
        return False
    return all(map(_is_known_split, first)) and (bool(first) or last["use_regex"])


def _is_known_split(step: dict[str, Any]) -> bool:
    return (
        step["type"] == "Split"
        and step["pattern"].get("Regex") in _PATTERNS
        and step["behavior"] == "Isolated"
        and not step["invert"]
    )


def _may_reach_over(token: dict[str, Any]) -> bool:
    return bool(token["rstrip"]) or " " in token["content"]
