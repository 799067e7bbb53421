"""Byte-pair vocabularies by rank, as tiktoken has them, in the form of the tokenizers library.

tiktoken joins the two neighbours whose joint bytes have the lowest rank, and first takes a whole
piece that is a token. The library joins by a list of pairs: it gets every pair of tokens that join
to a token, in the order of that token's rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from millstream_server.processor.text.vocabularies.vocabulary import (
    BrokenVocabularyError,
    add_special,
)

_BYTES = 256
_SHIFTED = 0x100


def byte_pair_tokenizer(
    ranks: Mapping[bytes, int], pattern: str, special: Mapping[str, int], *, first_id: int = 0
) -> Tokenizer:
    """Make the tokenizer.

    ``ranks`` are the tokens by their bytes, ``first_id`` is added to them; ``pattern`` divides a
    text; ``special`` tokens have ids of their own.

    Raises:
        BrokenVocabularyError: ranks are missing, or ids are twice.
    """
    _check(ranks, special, first_id)
    spelled = {token: token.decode("latin-1").translate(_LETTERS) for token in ranks}
    ids = {spelled[token]: rank + first_id for token, rank in ranks.items()}
    # A text that spells a special token is read as that, so the other is never made of a text.
    vocabulary = {**ids, **special}
    merges = [(spelled[left], spelled[right]) for left, right in _pairs(ranks)]
    if ids.keys() & special.keys():
        merges = [pair for pair in merges if not {*pair, pair[0] + pair[1]} & special.keys()]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    tokenizer.decoder = decoders.ByteLevel()
    add_special(tokenizer, special)
    return tokenizer


def _check(ranks: Mapping[bytes, int], special: Mapping[str, int], first_id: int) -> None:
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise BrokenVocabularyError(f"the ranks of its {len(ranks)} tokens have gaps or repeat")
    missing = next((byte for byte in range(_BYTES) if bytes([byte]) not in ranks), None)
    if missing is not None:
        raise BrokenVocabularyError(f"it has no token for the byte 0x{missing:02X}")
    taken = range(first_id, first_id + len(ranks))
    twice = next((text for text, token_id in special.items() if token_id in taken), None)
    if twice is not None or len(set(special.values())) != len(special):
        raise BrokenVocabularyError(f"the id of {twice or 'a special token'} is another token's")


def _pairs(ranks: Mapping[bytes, int]) -> Iterator[tuple[bytes, bytes]]:
    """Yield all pairs that join to a token, by its rank; of one token's, the lowest ranks first."""
    rank_of = ranks.get
    for token in sorted(ranks, key=ranks.__getitem__):
        found = [
            (left, right, token[:cut], token[cut:])
            for cut in range(1, len(token))
            if (right := rank_of(token[cut:])) is not None  # fewer tokens end in one than begin
            and (left := rank_of(token[:cut])) is not None
        ]
        for *_, first, second in sorted(found):
            yield first, second


def _alphabet() -> Mapping[int, str]:
    """Return GPT-2's alphabet: printable Latin-1 is itself, the rest U+0100 and up, in order."""
    printable = {ord(char) for char in pre_tokenizers.ByteLevel.alphabet() if ord(char) < _SHIFTED}
    others = [byte for byte in range(_BYTES) if byte not in printable]
    shifted = {byte: chr(_SHIFTED + place) for place, byte in enumerate(others)}
    return {byte: shifted.get(byte, chr(byte)) for byte in range(_BYTES)}


_LETTERS = _alphabet()
