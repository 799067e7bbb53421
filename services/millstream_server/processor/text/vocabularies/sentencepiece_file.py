"""sentencepiece's files: pieces with scores, of the kinds BPE and unigram."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
)

from millstream_server.processor.text.vocabularies.vocabulary import (
    BrokenVocabularyError,
    Vocabulary,
    put_bos_first,
)

_UNIGRAM, _BPE = 1, 2
_CONTROL, _USER_DEFINED, _BYTE = 3, 4, 6
_MERGED = frozenset((1, 5))
"""Kinds of pieces that are made by joining: normal and unused ones."""
_SPACE = "▁"


def read_sentencepiece(file: Path, names: Mapping[str, Any]) -> Vocabulary:
    """Read a file; ``names`` is tokenizer_config.json.

    Raises:
        BrokenVocabularyError: it is broken, or of another kind.
    """
    proto = _parsed(file)
    kind = proto.trainer_spec.model_type
    if kind not in (_UNIGRAM, _BPE):
        raise BrokenVocabularyError(f"it is of the kind {kind}, not BPE or unigram")
    tokenizer = Tokenizer(_bpe(proto) if kind == _BPE else _unigram(proto))
    _normalize(tokenizer, proto, whole=kind == _BPE)
    _add_tokens(tokenizer, proto)
    spec = proto.trainer_spec
    ends = {"bos_token": (spec.bos_id, spec.bos_piece), "eos_token": (spec.eos_id, spec.eos_piece)}
    found = {name: piece for name, (token_id, piece) in ends.items() if token_id >= 0}
    found["unk_token"] = spec.unk_piece
    if "bos_token" in found and names.get("add_bos_token", True):
        put_bos_first(tokenizer, found["bos_token"])
    return Vocabulary(tokenizer=tokenizer, special_tokens=found)


def _parsed(file: Path) -> Any:
    # transformers has the messages of this format; sentencepiece itself isn't needed.
    messages: Any = importlib.import_module("transformers.utils.sentencepiece_model_pb2_new")
    proto = messages.ModelProto()
    try:
        proto.ParseFromString(file.read_bytes())
    except Exception as error:  # protobuf's own class differs by implementation
        raise BrokenVocabularyError("it is no sentencepiece model") from error
    texts = [piece.piece for piece in proto.pieces]
    if not texts or len(set(texts)) != len(texts):
        raise BrokenVocabularyError("it is no sentencepiece model: pieces lack or repeat")
    return proto


def _bpe(proto: Any) -> models.BPE:
    vocabulary = {piece.piece: token_id for token_id, piece in enumerate(proto.pieces)}
    return models.BPE(
        vocabulary,
        list(_pairs(proto)),
        unk_token=proto.trainer_spec.unk_piece,
        fuse_unk=True,
        byte_fallback=proto.trainer_spec.byte_fallback,
    )


def _pairs(proto: Any) -> Iterator[tuple[str, str]]:
    """Yield all pairs of pieces that join to a piece, by its score."""
    scores = {piece.piece: piece.score for piece in proto.pieces if piece.type in _MERGED}
    for text, _ in sorted(scores.items(), key=lambda item: -item[1]):
        parts = ((text[:cut], text[cut:]) for cut in range(1, len(text)))
        found = [pair for pair in parts if pair[0] in scores and pair[1] in scores]
        yield from sorted(found, key=lambda pair: (-scores[pair[0]], -scores[pair[1]]))


def _unigram(proto: Any) -> models.Unigram:
    return models.Unigram(
        [(piece.piece, piece.score) for piece in proto.pieces],
        unk_id=proto.trainer_spec.unk_id,
        byte_fallback=proto.trainer_spec.byte_fallback,
    )


def _normalize(tokenizer: Tokenizer, proto: Any, *, whole: bool) -> None:
    """Set what is done to a text before, and behind; ``whole``: it isn't divided at spaces."""
    spec = proto.normalizer_spec
    prefix = spec.add_dummy_prefix
    steps: list[normalizers.Normalizer] = []
    if spec.precompiled_charsmap:
        steps.append(normalizers.Precompiled(spec.precompiled_charsmap))
    if spec.remove_extra_whitespaces:
        # Not Strip, which takes other blanks than spaces too.
        steps += [
            normalizers.Replace(Regex(r"\A +| +\z"), ""),
            normalizers.Replace(Regex(" {2,}"), " "),
        ]
    behind = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        steps.append(normalizers.Prepend(_SPACE))  # also before a space, which Metaspace doesn't
    steps.append(normalizers.Replace(" ", _SPACE))
    if not whole:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    tokenizer.normalizer = normalizers.Sequence(steps)
    if prefix:
        behind.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(behind)


def _add_tokens(tokenizer: Tokenizer, proto: Any) -> None:
    """Let control and user-defined pieces be read as one token each."""
    for piece in proto.pieces:
        if piece.type == _CONTROL:
            token = AddedToken(piece.piece, normalized=False, special=True)
            tokenizer.add_special_tokens([token])
        elif piece.type == _USER_DEFINED:
            # With spaces it has to be looked for where they are written as in the vocabulary.
            tokenizer.add_tokens([AddedToken(piece.piece, normalized=_SPACE in piece.piece)])
