"""One choice: exact text, exact token counts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from millstream_server.formats.choosing import AnswerFormat
from millstream_server.formats.events import Event, Reasoning, Text
from millstream_server.formats.families import FORMATS
from millstream_server.generation.output import Finish, FinishReason
from millstream_server.processor.answer import joined, reading_of
from millstream_server.processor.choice import Choice, Delta
from millstream_server.processor.conversation import Options
from millstream_server.processor.read_choice import ReadChoice
from millstream_server.processor.text.tokenizer import TextModel
from tests.support.models.models import byte_level_model, sample_texts


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return TextModel.load(byte_level_model(tmp_path_factory.mktemp("model")))


class Turn:
    """A turn that wants nothing; its text model and options are all that a choice reads."""

    scheduled, gathers, media, reading = True, False, None, None

    def __init__(self, model: TextModel, stops: Sequence[str]) -> None:
        self.text_model = model
        self.options = Options(path="", sampling={}, stops=tuple(stops))
        self.shown: dict[int, str] = {}

    @property
    def output(self) -> Turn:
        return self

    def leg_ended(self, leg: object) -> None:
        pass


def _choice(model: TextModel, stops: Sequence[str] = ()) -> Choice:
    turn: Any = Turn(model, stops)
    return Choice(turn, 0)


def _push(choice: Choice, ids: Sequence[int]) -> Delta:
    choice.emit(ids)
    delta = choice.take()
    assert delta
    return delta


def _end(choice: Choice) -> str:
    """Return the text that comes with the end."""
    choice.finish(Finish(reason=FinishReason.LENGTH, prompt_tokens=1, completion_tokens=1))
    delta = choice.take()
    assert choice.take() is None
    return delta.text if delta else ""


def test_without_stops_all_is_consumed(model: TextModel) -> None:
    choice = _choice(model)
    ids = model.encode("hello world", add_special_tokens=False)
    delta = _push(choice, ids)
    assert (delta.text, list(delta.token_ids)) == ("hello world", ids)
    assert _end(choice) == ""


def test_a_stop_ends_the_choice_at_the_token_that_completed_it(model: TextModel) -> None:
    choice = _choice(model, ["wor"])
    before = list(model.encode("hello", add_special_tokens=False))
    rest = [model.encode(char, add_special_tokens=False)[0] for char in " world"]
    delta = _push(choice, before + rest)
    assert (delta.text, len(delta.token_ids), delta.matched_stop) == (
        "hello ",
        len(before) + 4,
        "wor",
    )
    choice.emit(rest)
    assert choice.take() is None
    assert _end(choice) == ""


def test_a_stop_may_lie_across_pushes_and_characters(model: TextModel) -> None:
    ids = model.encode("a 😀!", add_special_tokens=False)
    choice = _choice(model, ["😀!"])
    deltas = [_push(choice, [token_id]) for token_id in ids]
    assert "".join(delta.text for delta in deltas) == "a "
    assert [delta.matched_stop for delta in deltas] == [None] * (len(ids) - 1) + ["😀!"]


def test_the_end_gives_out_what_was_held(model: TextModel) -> None:
    choice = _choice(model, ["world!"])
    assert _push(choice, model.encode("hello wor", add_special_tokens=False)).text == "hello "
    cut = model.encode("𝄞", add_special_tokens=False)[:-1]
    assert _push(choice, cut).text == ""
    assert _end(choice) == "wor\ufffd"


def test_a_stop_completed_by_the_end_is_not_sent(model: TextModel) -> None:
    choice = _choice(model, ["\ufffd"])
    _push(choice, model.encode("a𝄞", add_special_tokens=False)[:-1])
    assert _end(choice) == ""
    assert choice.finish_reason is FinishReason.STOP


def test_counts_do_not_depend_on_how_tokens_arrive(model: TextModel) -> None:
    chance = random.Random(5)
    for text in sample_texts(100, seed=6):
        ids = model.encode(text, add_special_tokens=False)
        stops = [text[at : at + 2] for at in (len(text) // 2, len(text) // 3)]
        stops = [stop for stop in stops if stop] or ["x"]
        whole = _push(_choice(model, stops), list(ids)) if ids else Delta(0)
        choice, sent, consumed, left = _choice(model, stops), "", 0, ids
        while left and choice.finish_reason is None:
            size = chance.randint(1, 4)
            delta = _push(choice, left[:size])
            sent, consumed, left = sent + delta.text, consumed + len(delta.token_ids), left[size:]
        assert (sent, consumed) == (whole.text, len(whole.token_ids))
        if whole.matched_stop is not None:
            shortest = next(n for n in range(len(ids) + 1) if _has_stop(model, ids[:n], stops))
            assert consumed == shortest


def _has_stop(model: TextModel, ids: Sequence[int], stops: list[str]) -> bool:
    text = model.decode(ids)
    return any(stop in text for stop in stops)


def test_a_stop_string_ends_an_answer_of_events(model: TextModel) -> None:
    how = AnswerFormat(form=FORMATS["hermes"], reason="", hidden={})
    turn: Any = Turn(model, ["STOP"])
    choice = ReadChoice(turn, 0, reading_of(how, (), "", one_call=False))
    ids = model.encode("<think>so</think>Hi STOP", add_special_tokens=False)
    events: list[Event] = []
    for token_id in ids:
        delta = _push(choice, [token_id])
        assert delta.text == ""
        events += delta.events
    assert joined(events) == [Reasoning("so"), Text("Hi ")]
    assert (delta.finish_reason, delta.matched_stop) == (FinishReason.STOP, "STOP")
    assert choice.message.reasoning == "so"
    assert choice.reasoning_tokens == len(
        model.encode("<think>so</think>", add_special_tokens=False)
    )
