"""The incremental text is the whole text, whatever the ids and however they arrive."""

from __future__ import annotations

import itertools
import random
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders
from tokenizers.decoders import DecodeStream

from millstream_server.processor.text.detokenizer import PieceTable, build_piece_table
from millstream_server.processor.text.detokenizer import detokenizer as start
from millstream_server.processor.text.tokenizer import TextModel
from tests.support.models.models import (
    byte_level_model,
    sample_texts,
    sentencepiece_model,
    token_id,
    unigram_model,
    wordpiece_model,
)
from tests.support.models.odd_texts import odd_texts

MAKERS: dict[str, Callable[[Path], Path]] = {
    "byte_level": byte_level_model,
    "sentencepiece": sentencepiece_model,
    "unigram": unigram_model,
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TextModel]:
    makers = MAKERS | {"wordpiece": wordpiece_model}
    return {
        name: TextModel.load(make(tmp_path_factory.mktemp(name))) for name, make in makers.items()
    }


@dataclass(frozen=True)
class StandIn:
    tokenizer: Tokenizer
    pieces: PieceTable | None


def byte_tokens(model: StandIn | TextModel, data: bytes) -> list[int]:
    return [token_id(model, f"<0x{byte:02X}>") for byte in data]


def in_parts(
    model: TextModel, ids: Sequence[int], chance: random.Random, *, skip_special_tokens: bool = True
) -> str:
    detokenizer = start(model, skip_special_tokens=skip_special_tokens)
    parts = []
    while ids:
        size = chance.randint(1, 5)
        parts.append(detokenizer.push(ids[:size]))
        ids = ids[size:]
    return "".join([*parts, detokenizer.flush()])


def random_ids(model: TextModel, chance: random.Random) -> list[int]:
    # Beyond the vocabulary, too: models pad theirs.
    return [chance.randrange(model.vocab_size + 5) for _ in range(chance.randint(0, 40))]


def runs_are_well_formed(model: TextModel, ids: list[int]) -> bool:
    """Tell whether every run of byte tokens is valid UTF-8."""
    # An id beyond the vocabulary has no text; it does not end a run.
    tokens = [token for token_id in ids if (token := model.tokenizer.id_to_token(token_id))]
    matches = [re.fullmatch("<0x(..)>", token) for token in tokens]
    data = b"".join(bytes([int(match[1], 16)]) if match else b"|" for match in matches)
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("skip_special_tokens", [True, False])
def test_parts_join_to_the_whole(
    models: dict[str, TextModel], name: str, *, skip_special_tokens: bool
) -> None:
    model, chance = models[name], random.Random(1)
    compared = 0
    for _ in range(1500):
        ids = random_ids(model, chance)
        whole = model.decode(ids, skip_special_tokens=skip_special_tokens)
        assert in_parts(model, ids, chance, skip_special_tokens=skip_special_tokens) == whole
        if runs_are_well_formed(model, ids):
            compared += 1
            library = model.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
            assert whole == library
    assert compared > 20


@pytest.mark.parametrize("name", MAKERS)
def test_texts_stream_exactly_as_the_library_decodes_them(
    models: dict[str, TextModel], name: str
) -> None:
    model, chance = models[name], random.Random(2)
    for text in sample_texts(300, seed=3):
        ids = model.encode(text, add_special_tokens=False)
        streamed = in_parts(model, ids, chance)
        assert streamed == model.tokenizer.decode(ids)
        if name != "unigram":  # it has no token for some letters
            assert streamed == text
    for text in odd_texts(10_000):
        ids = model.encode(text, add_special_tokens=False)
        assert in_parts(model, ids, chance) == model.tokenizer.decode(ids), text


@pytest.mark.parametrize("name", ["byte_level", "sentencepiece"])
def test_never_half_a_character(models: dict[str, TextModel], name: str) -> None:
    model = models[name]
    detokenizer = start(model)
    ids = model.encode("a 😀🎉 𝄞", add_special_tokens=False)
    parts = [detokenizer.push([token_id]) for token_id in ids]
    assert "\ufffd" not in "".join(parts)
    assert "".join(parts) == "a 😀🎉 𝄞"
    assert detokenizer.flush() == ""


@pytest.mark.parametrize("name", ["byte_level", "sentencepiece"])
def test_a_cut_character_is_given_out_once(models: dict[str, TextModel], name: str) -> None:
    model = models[name]
    ids = model.encode("ok 𝄞", add_special_tokens=False)
    detokenizer = start(model)
    assert detokenizer.push(ids[:-1]) == "ok "
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""


def test_a_bad_byte_spoils_only_itself(models: dict[str, TextModel]) -> None:
    model = models["sentencepiece"]
    ids = byte_tokens(model, "你".encode() + b"\xff")
    detokenizer = start(model)
    parts = [detokenizer.push([token_id]) for token_id in ids]
    assert parts == ["", "", "你", "\ufffd"]


def test_a_continuation_keeps_its_leading_space(models: dict[str, TextModel]) -> None:
    model = models["sentencepiece"]
    ids = model.encode("world", add_special_tokens=False)
    assert start(model).push(ids) == "world"
    assert start(model, continuation=True).push(ids) == " world"


@pytest.mark.parametrize("name", list(MAKERS))
def test_a_text_begins_with_the_character_that_its_prompt_ends_in(
    models: dict[str, TextModel], name: str
) -> None:
    """A client that goes on with a lost answer's tokens has no text of half a character."""
    model = models[name]
    ids = model.encode("é⏰", add_special_tokens=False)
    whole = start(model).push(ids)
    for cut in range(1, len(ids)):
        before, behind = start(model), start(model, continuation=True, behind=ids[:cut])
        assert before.push(ids[:cut]) + behind.push(ids[cut:]) == whole, cut


def test_half_a_character_of_the_prompt_that_nothing_completes_is_not_shown(
    models: dict[str, TextModel],
) -> None:
    model = models["sentencepiece"]
    first, letter = byte_tokens(model, b"\xc3a")
    behind = start(model, continuation=True, behind=[letter, first])
    assert (behind.push([letter]), behind.push([first]), behind.flush()) == ("a", "", "\ufffd")
    assert start(model, continuation=True, behind=[first]).flush() == ""


def test_the_leading_space_goes_though_a_special_token_came_first(
    models: dict[str, TextModel],
) -> None:
    model = models["sentencepiece"]
    ids = model.encode("hello world", add_special_tokens=True)
    detokenizer = start(model)
    assert [detokenizer.push([ids[0]]), detokenizer.push(ids[1:])] == ["", "hello world"]


@pytest.mark.parametrize(
    ("name", "text"),
    [("byte_level", "\ufffd" * 3), ("byte_level", "\x80"), ("sentencepiece", "😀")],
)
def test_undecided_text_costs_linear_time(
    models: dict[str, TextModel], name: str, text: str
) -> None:
    """A model that repeats half a character, or U+FFFD itself, must not stall the event loop."""
    model = models[name]
    first = model.encode(text, add_special_tokens=False)[-1]
    detokenizer = start(model)
    started = time.perf_counter()
    for _ in range(50_000):
        detokenizer.push((first,))
    # 0.05 s; the library's stream needs 0.1 s for the first 1,000 and minutes for all.
    assert time.perf_counter() - started < 2


def test_other_decoders_stream_through_the_library(models: dict[str, TextModel]) -> None:
    model, chance = models["wordpiece"], random.Random(4)
    assert model.pieces is None
    for text in sample_texts(50):
        ids = model.encode(text, add_special_tokens=False)
        assert in_parts(model, ids, chance) == model.tokenizer.decode(ids)


def test_the_library_path_survives_what_the_library_cannot_extend(
    models: dict[str, TextModel],
) -> None:
    """Leave out the table, so that a byte-fallback model takes the other path."""

    model = StandIn(models["sentencepiece"].tokenizer, None)
    ids = [*byte_tokens(model, "你".encode() + b"\xff"), token_id(model, "a")]
    detokenizer = start(model)
    assert detokenizer.push(ids) + detokenizer.flush() == "你\ufffda"
    started = time.perf_counter()
    text = detokenizer.push(byte_tokens(model, b"\xe4" * 5_000)) + detokenizer.flush()
    assert text.count("\ufffd") >= 5_000
    assert time.perf_counter() - started < 2


def test_the_librarys_stream_still_fails_after_a_bad_byte(models: dict[str, TextModel]) -> None:
    """If this fails, the library was mended: look whether the table is still worth having."""
    model = models["sentencepiece"]
    stream = DecodeStream(skip_special_tokens=True)
    for an_id in byte_tokens(model, "你".encode() + b"\xff"):
        stream.step(model.tokenizer, an_id)
    with pytest.raises(Exception, match="Invalid prefix"):
        stream.step(model.tokenizer, token_id(model, "a"))


@pytest.mark.parametrize(
    ("decoder", "has_table"),
    [
        (decoders.ByteLevel(), True),
        (decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()]), True),
        (decoders.Metaspace(), True),
        (decoders.Metaspace(prepend_scheme="never"), True),
        (decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback()]), True),
        (decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]), False),
        (decoders.Sequence([decoders.Fuse(), decoders.Replace("▁", " ")]), False),
        (
            decoders.Sequence(
                [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 2, 0)]
            ),
            False,
        ),
        (decoders.CTC(), False),
        (None, False),
    ],
)
def test_only_understood_decoders_get_a_table(
    models: dict[str, TextModel], decoder: decoders.Decoder | None, *, has_table: bool
) -> None:
    tokenizer = Tokenizer.from_str(models["unigram"].tokenizer.to_str())
    tokenizer.decoder = decoder
    table = build_piece_table(tokenizer)
    assert (table is not None) == has_table


@pytest.mark.parametrize("prepend_scheme", ["always", "first", "never"])
def test_metaspace_at_the_start_follows_its_scheme(
    models: dict[str, TextModel], prepend_scheme: str
) -> None:
    tokenizer = Tokenizer.from_str(models["unigram"].tokenizer.to_str())
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=prepend_scheme)
    tokenizer.add_tokens(["▁▁x", " raw"])

    model = StandIn(tokenizer, build_piece_table(tokenizer))
    ids = [token_id(model, token) for token in ("▁▁x", " raw", "▁")]
    for order in itertools.permutations(ids):
        detokenizer = start(model)
        assert detokenizer.push(order) + detokenizer.flush() == tokenizer.decode(list(order))
