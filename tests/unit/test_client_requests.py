"""Requests from plain values."""

from __future__ import annotations

from typing import Any

import pytest

from millstream.v1 import processor_pb2, sampling_pb2
from millstream_client.answers import Answer
from millstream_client.requests import Knobs, Sampling, complete_request, generation_options


def test_what_is_left_out_stays_unset() -> None:
    assert generation_options() == processor_pb2.GenerationOptions()
    assert complete_request("", model="", options=generation_options(), request_id="r") == (
        processor_pb2.CompleteRequest(
            text="", request_id="r", options=processor_pb2.GenerationOptions()
        )
    )


def test_zero_is_a_value() -> None:
    options = generation_options(temperature=0.0, seed=0, n=0)
    assert options.sampling.HasField("temperature")
    assert options.sampling.HasField("seed")
    assert options.HasField("n")


def test_a_prompt_of_no_ids_is_still_one_of_ids() -> None:
    request = complete_request([], model="", options=generation_options(), request_id="")
    assert request.WhichOneof("prompt") == "token_ids"


def test_knobs_beside_sampling_win() -> None:
    options = generation_options(
        sampling=sampling_pb2.SamplingParams(top_k=5, temperature=1.0), temperature=0.5
    )
    assert (options.sampling.top_k, options.sampling.temperature) == (5, 0.5)


def test_a_knob_that_there_is_not_is_refused() -> None:
    knobs: dict[str, Any] = {"max_tokens": 5}
    with pytest.raises(TypeError, match="'max_tokens' is no option"):
        generation_options(**knobs)


def test_every_field_of_the_contract_can_be_set() -> None:
    fields = set(processor_pb2.GenerationOptions.DESCRIPTOR.fields_by_name)
    knobs = {"min_interval" if k == "min_interval_s" else k for k in Knobs.__annotations__}
    assert knobs == fields | set(Sampling.__annotations__)
    assert set(Sampling.__annotations__) <= set(
        sampling_pb2.SamplingParams.DESCRIPTOR.fields_by_name
    )


def test_an_answer_keeps_choices_apart() -> None:
    answer = Answer()
    assert (answer.text, answer.finish_reason, answer.begun) == ("", 0, False)
    for index, text in ((1, "x"), (0, "a"), (1, "y")):
        delta = processor_pb2.ChoiceDelta(index=index, text=text, token_count=1)
        answer.add(processor_pb2.CompleteResponse(choices=[delta]))
    assert [(c.index, c.text, c.token_count) for c in answer.choices] == [(0, "a", 1), (1, "xy", 2)]
    assert (answer.text, answer.begun, answer.complete) == ("a", True, False)
