"""Incremental detokenization: token ids to text, in whole characters.

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

import codecs
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.decoders import DecodeStream

Step = Mapping[str, Any]
"""One decoder as the tokenizers library serialises it: a type and its options."""

Reader = Callable[[str], bytes]
"""Converts a token as written in the vocabulary into its bytes."""

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_MAX_UNDECIDED_TOKENS = 32
"""Most tokens for which the library may hold text back; a character has up to four bytes."""
_MAX_CHARACTER_TOKENS = 4
_NONE_SHOWN: Mapping[int, str] = {}


class Decodable(Protocol):
    """What the detokenizer needs of a model."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The library's tokenizer."""
        ...

    @property
    def pieces(self) -> PieceTable | None:
        """Bytes per token, or None if the decoder allows no such table."""
        ...


class Detokenizer(Protocol):
    """The text of one growing sequence of token ids.

    The texts returned by `push` and `flush` join to the same text however the ids were split, and
    that is `TextModel.decode` of all of them. Malformed UTF-8 becomes U+FFFD, one per ill-formed
    sequence (Unicode's recommended practice). For models with byte-fallback tokens this differs
    from the tokenizers library, which replaces a whole run of bytes if one is bad. To do the same,
    every such run would have to be held back, and scripts written in bytes would not stream at all.
    """

    def push(self, ids: Sequence[int], /) -> str:
        """Return the new text that the given ids complete; unknown ids have no text."""
        ...

    def flush(self) -> str:
        """Return the remaining text at the end; an incomplete character becomes U+FFFD."""
        ...


def detokenizer(
    model: Decodable,
    *,
    skip_special_tokens: bool = True,
    shown: Mapping[int, str] = _NONE_SHOWN,
    continuation: bool = False,
    behind: Sequence[int] = (),
) -> Detokenizer:
    """Start before the first token.

    ``shown``: texts of special tokens that aren't skipped, by id.

    ``continuation``: the ids continue a prompt's text, so that a SentencePiece model's leading
    space is kept; otherwise it is dropped. ``behind``: the prompt's ids. If they end inside of a
    character that the text completes, it begins with it: a client that goes on with an answer's
    tokens has nothing of it.
    """
    table = model.pieces
    if table is None:
        return _LibraryText(model.tokenizer, shown, skip_special_tokens=skip_special_tokens)
    pieces, texts = table.every, table.every_texts
    if skip_special_tokens:
        pieces, texts = table.showing(shown) if shown else (table.visible, table.visible_texts)
    made = _PieceText(pieces, pieces if continuation else table.opening, texts)
    if behind:
        made.begin_behind(behind[-_MAX_CHARACTER_TOKENS:])
    return made


class _PieceText:
    """Joins bytes from the table and decodes whole characters."""

    __slots__ = ("_opening", "_pieces", "_prompts", "_tail", "_texts")

    def __init__(
        self, pieces: Sequence[bytes], opening: Sequence[bytes], texts: dict[int, str]
    ) -> None:
        self._pieces = pieces
        self._texts = texts
        self._opening: Sequence[bytes] | None = None if opening is pieces else opening
        self._tail = b""
        self._prompts = False
        """The tail began in the prompt."""

    def begin_behind(self, ids: Sequence[int]) -> None:
        """Begin inside of the character that a prompt's last ids end in, if they do."""
        self._push(ids)  # this text is the prompt's
        self._prompts = bool(self._tail)

    def push(self, ids: Sequence[int]) -> str:
        if len(ids) != 1 or self._tail or self._opening is not None:
            return self._push(ids)
        (token_id,) = ids  # nearly always
        text = self._texts.get(token_id)
        if text is None:
            text = self._push(ids)
            if not self._tail and token_id < len(self._pieces):
                self._texts[token_id] = text
        return text

    def _push(self, ids: Sequence[int]) -> str:
        data = self._tail + self._bytes(ids)
        text, used = codecs.utf_8_decode(data, "replace", False)  # noqa: FBT003 (C function)
        self._tail = data[used:]
        return self._own(text) if self._prompts and text else text

    def flush(self) -> str:
        text = self._tail.decode("utf-8", "replace")
        self._tail = b""
        return self._own(text) if self._prompts else text

    def _own(self, text: str) -> str:
        """Leave out half a character of the prompt's that this text doesn't complete."""
        self._prompts = False
        return text.removeprefix("\ufffd")

    def _bytes(self, ids: Sequence[int]) -> bytes:
        if self._opening is not None:
            return self._opening_bytes(ids)
        pieces = self._pieces
        try:
            return b"".join([pieces[token_id] for token_id in ids])
        except IndexError:
            # Models pad their vocabulary beyond the tokenizer's; such a token has no text.
            return b"".join([pieces[token_id] for token_id in ids if token_id < len(pieces)])

    def _opening_bytes(self, ids: Sequence[int]) -> bytes:
        """Return the bytes up to the first token with text, which has bytes of its own."""
        for index, token_id in enumerate(ids):
            if token_id < len(self._pieces) and self._pieces[token_id]:
                first = self._opening[token_id] if self._opening is not None else b""
                self._opening = None
                return first + self._bytes(ids[index + 1 :])
        return b""


class _LibraryText:
    """The tokenizers library's decode stream, for decoders without a table (WordPiece and others).

    The library raises on, or holds back for ever, ids that it can't decode; then a new stream is
    started and the text so far is returned.
    """

    __slots__ = ("_shown", "_skip_special_tokens", "_stream", "_tokenizer", "_undecided")

    def __init__(
        self, tokenizer: Tokenizer, shown: Mapping[int, str], *, skip_special_tokens: bool
    ) -> None:
        self._tokenizer = tokenizer
        self._shown = shown
        self._skip_special_tokens = skip_special_tokens
        self._undecided: list[int] = []
        self._stream = DecodeStream(skip_special_tokens=skip_special_tokens)

    def push(self, ids: Sequence[int]) -> str:
        return "".join([self._step(token_id) for token_id in ids])

    def flush(self) -> str:
        text = self._tokenizer.decode(
            self._undecided, skip_special_tokens=self._skip_special_tokens
        )
        self._undecided = []
        self._stream = DecodeStream(skip_special_tokens=self._skip_special_tokens)
        return text

    def _step(self, token_id: int) -> str:
        if self._skip_special_tokens and (shown := self._shown.get(token_id)) is not None:
            return self.flush() + shown
        self._undecided.append(token_id)
        try:
            text: str | None = self._stream.step(self._tokenizer, token_id)
        except Exception as exc:
            # The binding raises no narrower class.
            if "Invalid prefix" not in str(exc):
                raise
            return self.flush()
        if text is not None:
            self._undecided = []
            return text
        return self.flush() if len(self._undecided) > _MAX_UNDECIDED_TOKENS else ""


# ---- the bytes of each token, computed once per model --------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class PieceTable:
    """Bytes per token id, in variants. Ids that the tokenizer lacks have no bytes."""

    every: Sequence[bytes]
    visible: Sequence[bytes]
    """As ``every``, with the special tokens empty."""
    opening: Sequence[bytes]
    """As ``every``, read as the first token of a text: SentencePiece drops its leading space."""
    every_texts: dict[int, str] = field(default_factory=dict)
    """The texts of ids whose bytes are whole characters, as far as they were asked for."""
    visible_texts: dict[int, str] = field(default_factory=dict)
    """Likewise."""
    _showing: dict[frozenset[int], tuple[Sequence[bytes], dict[int, str]]] = field(
        default_factory=dict
    )

    def showing(self, ids: Iterable[int]) -> tuple[Sequence[bytes], dict[int, str]]:
        """Return `visible` with these special tokens, and its texts; kept: a model has one set."""
        key = frozenset(ids)
        if key not in self._showing:
            pieces = list(self.visible)
            for token_id in key:
                pieces[token_id] = self.every[token_id]
            self._showing[key] = (pieces, {})
        return self._showing[key]


def build_piece_table(tokenizer: Tokenizer) -> PieceTable | None:
    """Make the table; return None if the decoder is of neither known family."""
    decoder = tokenizer.decoder
    steps = [] if decoder is None else _flatten(json.loads(decoder.__getstate__()))
    readers = _readers(steps)
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
