"""The bytes of each token, computed once per model from its decoder.

Nearly all generative models decode in one of two ways: byte-level BPE (GPT-2's alphabet of 256
printable characters) or SentencePiece (a meta symbol for the space, and `<0xE4>` tokens for bytes
without a token of their own). Both come down to joining bytes, so a table of bytes per token id
serves incremental decoding as well as the bytes of logprob entries.

`tokenizers.decoders.DecodeStream` isn't used for these (version 0.23; unit tests show why). It
decodes everything since the last whole character again: a model that repeats U+FFFD or half a
character takes quadratic time on the event loop. And with byte fallback an invalid byte after valid
ones raises in the middle of an answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenizers import Tokenizer, pre_tokenizers

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")

Step = Mapping[str, Any]
"""One decoder as the tokenizers library serialises it: a type and its options."""

Reader = Callable[[str], bytes]
"""Converts a token as written in the vocabulary into its bytes."""


@dataclass(frozen=True, slots=True, eq=False)
class PieceTable:
    """Bytes per token id, in three variants. Ids that the tokenizer lacks have no bytes."""

    every: Sequence[bytes]
    visible: Sequence[bytes]
    """As ``every``, with the special tokens empty."""
    opening: Sequence[bytes]
    """As ``every``, read as the first token of a text: SentencePiece drops its leading space."""
    every_texts: dict[int, str] = field(default_factory=dict)
    """The texts of ids whose bytes are whole characters, as far as they were asked for."""
    visible_texts: dict[int, str] = field(default_factory=dict)
    """Likewise."""


def build_piece_table(tokenizer: Tokenizer) -> PieceTable | None:
    """Make the table; return None if the decoder is of neither known family."""
    readers = _readers(_decoder_steps(tokenizer))
    if readers is None:
        return None
    read, read_opening = readers
    tokens = _tokens_by_id(tokenizer)
    every = [read(token) for token in tokens]
    visible = every.copy()
    for token_id, added in tokenizer.get_added_tokens_decoder().items():
        if added.special:
            visible[token_id] = b""
    opening = every if read_opening is read else [read_opening(token) for token in tokens]
    return PieceTable(every, visible, opening)


def _tokens_by_id(tokenizer: Tokenizer) -> list[str]:
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    tokens = [""] * (max(vocabulary.values(), default=-1) + 1)
    for token, token_id in vocabulary.items():
        tokens[token_id] = token
    return tokens


def _decoder_steps(tokenizer: Tokenizer) -> list[Step]:
    decoder = tokenizer.decoder
    if decoder is None:
        return []
    return _flatten(json.loads(decoder.__getstate__()))


def _flatten(step: Step) -> list[Step]:
    if step["type"] != "Sequence":
        return [step]
    return [inner for part in step["decoders"] for inner in _flatten(part)]


def _readers(steps: Sequence[Step]) -> tuple[Reader, Reader] | None:
    """Return the readers for tokens inside a text and at its start; None if not supported."""
    kinds = [step["type"] for step in steps]
    if kinds in (["ByteLevel"], ["ByteLevel", "Fuse"]):
        read = _byte_level_reader()
        return read, read
    return _sentencepiece_readers(steps)


def _byte_level_reader() -> Reader:
    """Reverse GPT-2's alphabet: printable Latin-1 is itself, the rest U+0100 and up, in order."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    byte_of = {char: ord(char) for char in alphabet if ord(char) < 0x100}  # noqa: PLR2004
    others = (byte for byte in range(256) if chr(byte) not in byte_of)
    byte_of.update(zip((char for char in alphabet if char not in byte_of), others, strict=True))

    def read(token: str) -> bytes:
        try:
            return bytes([byte_of[char] for char in token])
        except KeyError:
            # Added tokens are written as plain text, not in the alphabet.
            return token.encode()

    return read


def _sentencepiece_readers(steps: Sequence[Step]) -> tuple[Reader, Reader] | None:
    """Accept text replacements, then byte fallback, then joining, then one leading space less.

    Any other order has another meaning, so the library's own stream is used.
    """
    rest = list(steps)
    replacements: list[tuple[str, str, str]] = []
    while rest and (replacement := _replacement(rest[0])) is not None:
        replacements.append(replacement)
        rest.pop(0)
    kinds = [step["type"] for step in rest]
    has_byte_fallback = kinds[:1] == ["ByteFallback"]
    tail = rest[1:] if has_byte_fallback else rest
    strips = len(tail) == 2 and tail[0]["type"] == "Fuse" and _is_leading_space_strip(tail[1])  # noqa: PLR2004
    if not replacements or not (strips or [step["type"] for step in tail] in ([], ["Fuse"])):
        return None

    def read_as(token: str, *, opening: bool) -> bytes:
        for pattern, inside, at_start in replacements:
            token = token.replace(pattern, at_start if opening else inside)
        if has_byte_fallback and (byte := _BYTE_TOKEN.fullmatch(token)) is not None:
            data = bytes([int(byte[1], 16)])
        else:
            data = token.encode()
        return data.removeprefix(b" ") if opening and strips else data

    return (lambda token: read_as(token, opening=False)), (
        lambda token: read_as(token, opening=True)
    )


def _replacement(step: Step) -> tuple[str, str, str] | None:
    """Return the replaced text, its replacement inside a text, and that in the first token."""
    if step["type"] == "Metaspace":
        space_at_start = " " if step["prepend_scheme"] == "never" else ""
        return step["replacement"], " ", space_at_start
    if step["type"] == "Replace" and "String" in step["pattern"]:
        return step["pattern"]["String"], step["content"], step["content"]
    return None


def _is_leading_space_strip(step: Step) -> bool:
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    return all(step.get(key) == value for key, value in strip.items())
