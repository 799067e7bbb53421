"""Cuts long texts where the tokenizer cuts them too, so that they can be tokenized in parts.

The tokenizers library takes 200 to 300 bytes for each character of a text that it encodes. Parts
have the same ids as the whole text where the tokenizer's first steps can't join what is on both
sides of a cut. The cut here is between an ASCII letter and a space with another letter behind it:
the patterns below end a match behind such a letter and look at nothing before a match; NFC changes
neither; and no added token reaches over it. For other tokenizers texts are not cut.

A text that surely has too many tokens needs no tokenizing. Where a tokenizer splits texts at blanks
first, each word with an ASCII letter or digit has a token at least. Where it keeps all bytes, a
token has at most as many as the longest one of the vocabulary.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from millstream_server.processor.text.detokenizer import PieceTable
from millstream_server.runtime.work.pool import stop_if_gone

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


_COUNTED_AT_ONCE = 1 << 16
"""Characters whose words are counted in one step: 2 ms, for which the GIL is kept."""
_WORD = re.compile("[A-Za-z0-9](?= )")
_SPLITTERS = frozenset({"BertPreTokenizer", "Metaspace", "Whitespace", "WhitespaceSplit"})
_NORMALIZERS = frozenset((
    *("BertNormalizer", "Lowercase", "NFC", "NFD", "NFKC", "NFKD"),
    *("Nmt", "Precompiled", "Prepend", "Strip", "StripAccents"),
))  # fmt: skip
"""What keeps letters, digits and the blanks between them."""
_NFC_SHRINKS = 3
"""NFC makes three bytes of nine: of the three parts of a Hangul syllable."""
_BYTES = 256


@dataclass(frozen=True, slots=True)
class Floor:
    """What is known of the least number of tokens that a text can have."""

    words: bool
    """Whether each word has a token at least."""
    longest: int | None
    """Most bytes of a text in one token; None: there may be any number."""
    composes: bool
    """Whether a text may lose bytes before that, by NFC."""

    def exceeds(self, text: str, tokens: int) -> bool:
        """Return whether a text surely has more tokens; False: it may or may not.

        It takes 3 ns per character, up to so many words; call it in a thread for long texts.
        """
        if self.longest:
            nbytes = len(text) if text.isascii() else len(text.encode())
            shrinks = _NFC_SHRINKS if self.composes and not text.isascii() else 1
            if nbytes > tokens * self.longest * shrinks:
                return True
        if not self.words:
            return False
        found = 0
        for start in range(0, len(text), _COUNTED_AT_ONCE):
            stop_if_gone()
            found += len(_WORD.findall(text, start, start + _COUNTED_AT_ONCE))
            if found > tokens:
                return True
        return False


NO_FLOOR = Floor(words=False, longest=None, composes=False)


def floor_of(tokenizer: Tokenizer, frame: Frame | None, pieces: PieceTable | None) -> Floor:
    """Read what is known from a tokenizer, its frame and its pieces."""
    facts = json.loads(tokenizer.to_str())
    added = facts["added_tokens"]
    one_by_one = not any(re.search(r"\s", token["content"]) for token in added)
    longest = None
    if frame is not None and pieces is not None and not any(token["lstrip"] for token in added):
        known = set(pieces.every)
        if all(bytes([value]) in known for value in range(_BYTES)):  # else some may be left out
            longest = max(map(len, known))
    return Floor(
        words=one_by_one and _keeps_words(facts["normalizer"]) and _splits(facts["pre_tokenizer"]),
        longest=longest,
        composes=facts["normalizer"] is not None,
    )


def _keeps_words(normalizer: dict[str, Any] | None) -> bool:
    if normalizer is None or normalizer["type"] in _NORMALIZERS:
        return True
    if normalizer["type"] == "Sequence":
        return all(map(_keeps_words, normalizer["normalizers"]))
    # Blanks by others, as SentencePiece's tokenizers do.
    return (
        normalizer["type"] == "Replace"
        and normalizer["pattern"] in ({"String": " "}, {"Regex": " {2,}"})
        and normalizer["content"] in (" ", "▁")
    )


def _splits(pre_tokenizer: dict[str, Any] | None) -> bool:
    """Whether texts are split between a letter or digit, a blank and the next word."""
    if pre_tokenizer is None:
        return False
    if pre_tokenizer["type"] == "Sequence":
        return any(map(_splits, pre_tokenizer["pretokenizers"]))
    if pre_tokenizer["type"] == "Metaspace":
        return bool(pre_tokenizer.get("split", True))
    if pre_tokenizer["type"] == "ByteLevel":
        return bool(pre_tokenizer["use_regex"])
    return pre_tokenizer["type"] in _SPLITTERS or (
        pre_tokenizer["type"] == "Split" and _is_known_split(pre_tokenizer)
    )


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
    # An added token may reach over a cut.
    if any(token["rstrip"] or " " in token["content"] for token in tokenizer["added_tokens"]):
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
