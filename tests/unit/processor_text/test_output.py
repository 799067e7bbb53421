"""One choice: exact text, exact token counts."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from millstream_server.processor.text.output import ChoiceText, TextDelta
from millstream_server.processor.text.tokenizer import TextModel
from tests.support.models import byte_level_model, sample_texts


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return TextModel.load(byte_level_model(tmp_path_factory.mktemp("model")))


def test_without_stops_all_is_consumed(model: TextModel) -> None:
    choice = ChoiceText(model)
    ids = model.encode("hello world", add_special_tokens=False)
    assert choice.push(ids) == TextDelta("hello world", len(ids))
    assert choice.finish() == ""


def test_a_stop_ends_the_choice_at_the_token_that_completed_it(model: TextModel) -> None:
    choice = ChoiceText(model, ["wor"])
    before = list(model.encode("hello", add_special_tokens=False))
    rest = [model.encode(char, add_special_tokens=False)[0] for char in " world"]
    delta = choice.push(before + rest)
    assert delta == TextDelta("hello ", len(before) + 4, "wor")
    assert choice.push(rest) == TextDelta("", 0, "wor")
    assert choice.finish() == ""


def test_a_stop_may_lie_across_pushes_and_characters(model: TextModel) -> None:
    ids = model.encode("a 😀!", add_special_tokens=False)
    choice = ChoiceText(model, ["😀!"])
    deltas = [choice.push([token_id]) for token_id in ids]
    assert "".join(delta.text for delta in deltas) == "a "
    assert [delta.matched_stop for delta in deltas] == [None] * (len(ids) - 1) + ["😀!"]


def test_finish_gives_out_what_was_held(model: TextModel) -> None:
    choice = ChoiceText(model, ["world!"])
    assert choice.push(model.encode("hello wor", add_special_tokens=False)).text == "hello "
    cut = model.encode("𝄞", add_special_tokens=False)[:-1]
    assert choice.push(cut).text == ""
    assert choice.finish() == "wor\ufffd"
    assert choice.finish() == ""


def test_a_stop_completed_by_the_last_flush_is_not_sent(model: TextModel) -> None:
    choice = ChoiceText(model, ["\ufffd"])
    choice.push(model.encode("a𝄞", add_special_tokens=False)[:-1])
    assert choice.finish() == ""


def test_counts_do_not_depend_on_how_tokens_arrive(model: TextModel) -> None:
    chance = random.Random(5)
    for text in sample_texts(100, seed=6):
        ids = model.encode(text, add_special_tokens=False)
        stops = [text[at : at + 2] for at in (len(text) // 2, len(text) // 3)]
        stops = [stop for stop in stops if stop] or ["x"]
        whole = ChoiceText(model, stops).push(ids)
        choice, sent, consumed, left = ChoiceText(model, stops), "", 0, ids
        while left:
            size = chance.randint(1, 4)
            delta = choice.push(left[:size])
            sent, consumed, left = sent + delta.text, consumed + delta.consumed_tokens, left[size:]
        assert (sent, consumed) == (whole.text, whole.consumed_tokens)
        if whole.matched_stop is not None:
            shortest = next(n for n in range(len(ids) + 1) if _has_stop(model, ids[:n], stops))
            assert consumed == shortest


def _has_stop(model: TextModel, ids: Sequence[int], stops: list[str]) -> bool:
    text = model.decode(ids)
    return any(stop in text for stop in stops)
