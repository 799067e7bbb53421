"""Answers as objects: the schema that is sent for a type, and what a text becomes."""

from __future__ import annotations

import enum
import json
from dataclasses import dataclass
from typing import Any, Literal, NotRequired, TypedDict

import pytest
from pydantic import BaseModel

from millstream.v1 import processor_pb2
from millstream_client import (
    NO_RETRY,
    Answer,
    AnswerFormatError,
    Client,
    Constraint,
    FinishReason,
)
from millstream_client.structured import constraint_of, parse
from millstream_testing.fake_processor import FakeServer


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclass
class Wheel:
    size: float
    spokes: int | None


class Mill(TypedDict):
    name: str
    kind: Literal["wind", "water"]
    wheels: list[Wheel]
    colour: NotRequired[Colour]
    counts: NotRequired[dict[str, int]]


class Review(BaseModel):
    stars: int


@dataclass
class Endless:
    inner: list[Endless]


_TEXT = '{"name": "A", "kind": "water", "wheels": [{"size": 2, "spokes": null}], "colour": "red"}'


def test_a_types_schema_and_its_object() -> None:
    wheel = {
        "type": "object",
        "properties": {
            "size": {"type": "number"},
            "spokes": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        },
        "required": ["size", "spokes"],
        "additionalProperties": False,
    }
    assert json.loads(constraint_of(Mill).json_schema) == {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "kind": {"enum": ["wind", "water"]},
            "wheels": {"type": "array", "items": wheel},
            "colour": {"enum": ["red", "blue"]},
            "counts": {"type": "object", "additionalProperties": {"type": "integer"}},
        },
        "required": ["name", "kind", "wheels"],
        "additionalProperties": False,
    }
    assert parse(Mill, _TEXT) == {
        "name": "A",
        "kind": "water",
        "wheels": [Wheel(2.0, None)],
        "colour": Colour.RED,
    }


@pytest.mark.parametrize(
    ("answer_type", "schema", "parsed"),
    [
        (Review, Review.model_json_schema(), Review(stars=4)),
        ({"type": "object"}, {"type": "object"}, {"stars": 4}),
    ],
)
def test_pydantic_models_and_schemas(answer_type: Any, schema: Any, parsed: Any) -> None:
    assert json.loads(constraint_of(answer_type).json_schema) == schema
    assert parse(answer_type, '{"stars": 4}') == parsed


@pytest.mark.parametrize(
    ("answer_type", "sentence"),
    [(int, "not 'int'"), ("x", "not 'the schema'"), (Endless, "Endless contains itself")],
)
def test_what_is_no_type_is_refused(answer_type: Any, sentence: str) -> None:
    with pytest.raises(TypeError, match=sentence):
        constraint_of(answer_type)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (_TEXT.replace('"water"', '"steam"'), '"steam" is no Literal'),
        (_TEXT.replace('"name": "A", ', ""), "Mill lacks name"),
        (_TEXT.replace('"name"', '"x": 1, "name"'), "Mill has no x"),
        (_TEXT.replace("null", '"few"'), '"few" is no'),
    ],
)
def test_a_text_that_does_not_fit(text: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        parse(Mill, text)


def _answered(text: str, reason: FinishReason.ValueType) -> Answer:
    answer = Answer(answer_type=Review, request_id="r1")
    delta = processor_pb2.ChoiceDelta(text=text, token_count=3, finish_reason=reason)
    finished = processor_pb2.TurnFinished()
    answer.add(processor_pb2.ChatResponse(choices=[delta], finished=finished))
    return answer


def test_an_answer_is_parsed_or_says_why_not() -> None:
    stop, length = FinishReason.FINISH_REASON_STOP, FinishReason.FINISH_REASON_LENGTH
    assert _answered('{"stars": 4}', stop).parsed == Review(stars=4)
    cut = _answered('{"sta', length)
    with pytest.raises(
        AnswerFormatError, match=r"cut off after 3 tokens.*larger max_new"
    ) as caught:
        _ = cut.parsed
    assert (caught.value.reason, caught.value.partial) == ("ANSWER_CUT_OFF", cut)
    assert str(caught.value).endswith("request r1")
    with pytest.raises(AnswerFormatError, match="doesn't fit Review") as caught:
        _ = _answered('{"stars": "four"}', stop).parsed
    assert caught.value.reason == "ANSWER_NOT_PARSED"
    with pytest.raises(AnswerFormatError, match="read the stream to its end"):
        _ = Answer(answer_type=Review).parsed
    with pytest.raises(TypeError, match="give answer_type="):
        _ = Answer().parsed


async def test_the_schema_goes_with_the_request() -> None:
    async with FakeServer() as server, Client(server.address, retry=NO_RETRY) as client:
        answer = await client.chat("a review", answer_type=Review, max_new_tokens=9).answer()
        with pytest.raises(AnswerFormatError, match="doesn't fit Review"):
            _ = answer.parsed
        with pytest.raises(TypeError, match="give one of the two"):
            client.chat("x", answer_type=Review, constraint=Constraint(regex="a"))
        sampling = server.processor.starts[0].options.sampling
    assert (sampling.constraint, sampling.max_new_tokens) == (constraint_of(Review), 9)
