"""Long texts are tokenized in parts, with the ids that the whole text has."""

from __future__ import annotations

import json
import random
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, normalizers, pre_tokenizers, processors

from millstream_server.processor.text import long_texts, tokenizer
from millstream_server.processor.text.long_texts import floor_of, frame_of, parts_of
from millstream_server.processor.text.tokenizer import TextModel
from millstream_server.runtime.work.pool import WorkStoppedError
from tests.support.models.models import (
    byte_level_model,
    sentencepiece_model,
    unigram_model,
    wordpiece_model,
)

QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA = QWEN.replace(r"\p{N}|", r"\p{N}{1,3}|", 1)
PIECES = (
    *("the quick brown", " fox", " ", "  ", "\n", "\r\n", "\t", "'s", "'LL", "12345", " 7", ", "),
    *("a\u0301", " \u0338", "e", "\u0301", "é", "ß", "你好", " 界", "😀", " 𝄞", "\u2000", "\u00a0"),
    *("<|im_end|>", " <|im_end|> ", "<|im_end|>x y", "x", "I am", "a b c", "_", "!?", "://", "ǅ z"),
)  # fmt: skip


@pytest.fixture(autouse=True)
def short_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut often: at each place where the text may be cut."""
    monkeypatch.setattr(long_texts, "PART_CHARS", 1)
    monkeypatch.setattr(tokenizer, "PART_CHARS", 1)


def _texts() -> list[str]:
    chance = random.Random(7)
    return ["".join(chance.choices(PIECES, k=600)) for _ in range(20)]


def _as_gpt2(found: Tokenizer) -> None:
    del found


def _with_prefix_space(found: Tokenizer) -> None:
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)


def _split_by(pattern: str) -> Callable[[Tokenizer], None]:
    def change(found: Tokenizer) -> None:
        found.normalizer = normalizers.NFC()
        found.pre_tokenizer = pre_tokenizers.Sequence([
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ])  # fmt: skip

    return change


def _framed(found: Tokenizer) -> None:
    tokens = [(name, found.token_to_id(name)) for name in ("<|im_start|>", "<|im_end|>")]
    found.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A <|im_end|>", special_tokens=tokens
    )


@pytest.mark.parametrize(
    "change",
    [_as_gpt2, _with_prefix_space, _split_by(QWEN), _split_by(LLAMA), _framed],
    ids=["GPT-2", "prefix space", "Qwen", "Llama 3", "framed"],
)
@pytest.mark.parametrize("special", [True, False])
def test_parts_have_the_ids_of_the_whole_text(
    change: Callable[[Tokenizer], None], special: Any, tmp_path: Path
) -> None:
    model = TextModel.load(_changed(byte_level_model(tmp_path), change))
    assert model.frame is not None
    for text in _texts():
        assert len(list(parts_of(text))) > 50
        whole = model.tokenizer.encode(text, add_special_tokens=special).ids
        ids = model.encode(text, add_special_tokens=special)
        assert type(ids) is array  # a tenth of the memory
        assert list(ids) == whole


def test_a_long_text_is_given_to_the_library_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = TextModel.load(byte_level_model(tmp_path))
    given: list[str] = []
    encode = TextModel._encode

    def watched(self: TextModel, text: str, *, add_special_tokens: bool) -> list[int]:
        given.append(text)
        return encode(self, text, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(TextModel, "_encode", watched)
    text = "many words " * 1_000
    model.encode(text, add_special_tokens=False)
    assert "".join(given) == text
    assert max(map(len, given)) < 20


def test_a_long_text_is_given_up_between_its_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = TextModel.load(byte_level_model(tmp_path))

    def gone() -> None:
        raise WorkStoppedError

    monkeypatch.setattr(tokenizer, "stop_if_gone", gone)
    with pytest.raises(WorkStoppedError):
        model.encode("many words " * 1_000, add_special_tokens=False)


def test_a_text_without_a_place_for_a_cut_stays_whole() -> None:
    for text in ("x" * 9_999, "x\n" * 9_999, "1 2 " * 9_999, "你 好 " * 9_999, ""):
        assert list(parts_of(text)) == [text]


@pytest.mark.parametrize("make", [sentencepiece_model, unigram_model, wordpiece_model])
def test_other_tokenizers_texts_are_not_cut(make: Callable[[Path], Path], tmp_path: Path) -> None:
    assert TextModel.load(make(tmp_path)).frame is None


def _other_pattern(found: dict[str, Any]) -> None:
    found["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = r"\w+ \w+"


def _other_behavior(found: dict[str, Any]) -> None:
    found["pre_tokenizer"]["pretokenizers"][0]["behavior"] = "MergedWithNext"


def _no_split(found: dict[str, Any]) -> None:
    del found["pre_tokenizer"]["pretokenizers"][0]


def _no_pre_tokenizer(found: dict[str, Any]) -> None:
    found["pre_tokenizer"] = None


def _other_normalizer(found: dict[str, Any]) -> None:
    found["normalizer"] = {"type": "Strip", "strip_left": True, "strip_right": True}


def _token_with_a_space(found: dict[str, Any]) -> None:
    found["added_tokens"][0]["content"] = "the quick"


def _token_that_takes_spaces(found: dict[str, Any]) -> None:
    found["added_tokens"][0]["rstrip"] = True


@pytest.mark.parametrize("change", [
    _other_pattern, _other_behavior, _no_split, _no_pre_tokenizer, _other_normalizer,
    _token_with_a_space, _token_that_takes_spaces,
])  # fmt: skip
def test_what_could_join_both_sides_of_a_cut(
    change: Callable[[dict[str, Any]], None], tmp_path: Path
) -> None:
    path = _changed(byte_level_model(tmp_path), _split_by(QWEN)) / "tokenizer.json"
    content = json.loads(path.read_text())
    assert frame_of(Tokenizer.from_str(json.dumps(content))) is not None
    change(content)
    assert frame_of(Tokenizer.from_str(json.dumps(content))) is None


def _changed(path: Path, change: Callable[[Tokenizer], None]) -> Path:
    found = Tokenizer.from_file(str(path / "tokenizer.json"))
    change(found)
    found.save(str(path / "tokenizer.json"))
    return path


def _has_token_with_a_space(found: Tokenizer) -> None:
    found.add_tokens([AddedToken("the quick")])


def _strips_left(found: Tokenizer) -> None:
    found.add_tokens([AddedToken("<mask>", lstrip=True)])


@pytest.mark.parametrize(
    ("make", "change"),
    [
        (byte_level_model, _as_gpt2),
        (byte_level_model, _with_prefix_space),
        (byte_level_model, _split_by(QWEN)),
        (byte_level_model, _split_by(LLAMA)),
        (byte_level_model, _framed),
        (byte_level_model, _has_token_with_a_space),
        (byte_level_model, _strips_left),
        (sentencepiece_model, _as_gpt2),
        (unigram_model, _as_gpt2),
        (wordpiece_model, _as_gpt2),
    ],
    ids=range(10),
)
def test_no_text_is_refused_that_has_no_more_tokens(
    make: Callable[[Path], Path], change: Callable[[Tokenizer], None], tmp_path: Path
) -> None:
    model = TextModel.load(make(tmp_path))
    change(model.tokenizer)
    floor = floor_of(model.tokenizer, frame_of(model.tokenizer), model.pieces)
    odd = ["\u1112\u1161\u11ab" * 99, "\u212a" * 99, "x" * 999, " " * 999, "\0 a " * 99, "é" * 99]
    for text in (*_texts(), *odd, " " * 99 + "<mask>", "the quick " * 99):
        count = len(model.tokenizer.encode(text, add_special_tokens=False).ids)
        assert not floor.exceeds(text, count), (text[:40], count)


@pytest.mark.parametrize(
    ("make", "seen"),
    [
        (byte_level_model, [True, True]),
        (unigram_model, [True, False]),  # unknown characters in a row are one token
        (wordpiece_model, [True, False]),  # a long word is one token
        (sentencepiece_model, [True, False]),
    ],
)
def test_a_text_that_surely_has_too_many_tokens(
    make: Callable[[Path], Path], seen: list[bool], tmp_path: Path
) -> None:
    floor = TextModel.load(make(tmp_path)).floor
    assert [floor.exceeds(text, 512) for text in ("the fox " * 1000, "x" * 99_999)] == seen
