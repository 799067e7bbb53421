"""Incremental detokenization: token ids to text, in whole characters."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from millstream_server.processor.text.pieces import PieceTable

_MAX_UNDECIDED_TOKENS = 32
"""Most tokens for which the library may hold text back; a character has up to four bytes."""


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
    model: Decodable, *, skip_special_tokens: bool = True, continuation: bool = False
) -> Detokenizer:
    """Start before the first token.

    ``continuation``: the ids continue a prompt's text, so that a SentencePiece model's leading
    space is kept; otherwise it is dropped.
    """
    table = model.pieces
    if table is None:
        return _LibraryText(model.tokenizer, skip_special_tokens=skip_special_tokens)
    pieces = table.visible if skip_special_tokens else table.every
    texts = table.visible_texts if skip_special_tokens else table.every_texts
    return _PieceText(pieces, pieces if continuation else table.opening, texts)


class _PieceText:
    """Joins bytes from the table and decodes whole characters."""

    __slots__ = ("_opening", "_pieces", "_tail", "_texts")

    def __init__(
        self, pieces: Sequence[bytes], opening: Sequence[bytes], texts: dict[int, str]
    ) -> None:
        self._pieces = pieces
        self._texts = texts
        self._opening: Sequence[bytes] | None = None if opening is pieces else opening
        self._tail = b""

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
        return text

    def flush(self) -> str:
        text = self._tail.decode("utf-8", "replace")
        self._tail = b""
        return text

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

    __slots__ = ("_skip_special_tokens", "_stream", "_tokenizer", "_undecided")

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
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
