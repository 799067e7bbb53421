"""Requests from plain values."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from google.protobuf import duration_pb2

from millstream.v1 import processor_pb2, sampling_pb2
from millstream_client.answers import Answer
from millstream_client.diffusion_requests import image_request, video_request
from millstream_client.knobs import KNOBS, Knobs, Sampling, generation_options
from millstream_client.requests import chat_start, complete_request
from millstream_client.vector_requests import embed_requests, rerank_request


def test_what_is_left_out_stays_unset() -> None:
    assert generation_options() == processor_pb2.GenerationOptions()
    assert complete_request("", request_id="r") == (
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
    request = complete_request([])
    assert request.WhichOneof("prompt") == "token_ids"


def test_knobs_beside_sampling_win() -> None:
    options = generation_options(
        sampling=sampling_pb2.SamplingParams(top_k=5, temperature=1.0), temperature=0.5
    )
    assert (options.sampling.top_k, options.sampling.temperature) == (5, 0.5)
    options = generation_options(
        sampling=sampling_pb2.SamplingParams(stop_token_ids=[1]), stop_token_ids=[2]
    )
    assert list(options.sampling.stop_token_ids) == [2]


def test_a_knob_that_there_is_not_is_refused() -> None:
    for name, advice in {
        "max_tokens": ": write max_new_tokens=",
        "temprature": "; did you mean temperature=?",
    }.items():
        knobs: dict[str, Any] = {name: 5}
        with pytest.raises(TypeError) as refused:
            generation_options(**knobs)
        assert str(refused.value) == f"{name!r} is no option of a generation{advice}"


@pytest.mark.parametrize(
    "make",
    [
        complete_request,
        embed_requests,
        image_request,
        partial(rerank_request, documents=[]),
        video_request,
    ],
)
def test_every_kind_of_request_refuses_unknown_keywords(make: Any) -> None:
    with pytest.raises(TypeError, match="max_tokens"):
        make("Hello", max_tokens=5)


def test_every_field_of_the_contract_can_be_set() -> None:
    fields = set(processor_pb2.GenerationOptions.DESCRIPTOR.fields_by_name)
    knobs = {"min_interval" if k == "min_interval_s" else k for k in Knobs.__annotations__}
    assert knobs == fields | set(Sampling.__annotations__)
    assert set(Sampling.__annotations__) == set(
        sampling_pb2.SamplingParams.DESCRIPTOR.fields_by_name
    )


def test_knobs_of_every_kind_are_converted() -> None:
    constraint = sampling_pb2.Constraint(regex="a+")
    options = generation_options(
        stop_token_ids=[1, 2],
        logit_bias={3: -1.5},
        constraint=constraint,
        ignore_eos=False,
        stop="x",
        min_interval_s=0.25,
        logprobs=sampling_pb2.LogprobOptions(top=2),
        priority=processor_pb2.REQUEST_PRIORITY_LOW,
    )
    assert options == processor_pb2.GenerationOptions(
        sampling=sampling_pb2.SamplingParams(
            stop_token_ids=[1, 2], logit_bias={3: -1.5}, constraint=constraint, ignore_eos=False
        ),
        stop=["x"],
        min_interval=duration_pb2.Duration(nanos=250_000_000),
        logprobs=sampling_pb2.LogprobOptions(top=2),
        priority=processor_pb2.REQUEST_PRIORITY_LOW,
    )
    assert options.sampling.HasField("ignore_eos")


def test_the_table_of_knobs_has_every_plain_field_with_its_help() -> None:
    fields = sampling_pb2.SamplingParams.DESCRIPTOR.fields
    plain = [f.name for f in fields if f.message_type is None]
    assert [knob.name for knob in KNOBS] == plain
    assert all(knob.help for knob in KNOBS)
    assert {knob.name for knob in KNOBS if knob.repeated} == {"stop_token_ids"}


def test_an_answer_keeps_choices_apart() -> None:
    answer = Answer()
    assert (answer.text, answer.finish_reason, answer.begun) == ("", 0, False)
    for index, text in ((1, "x"), (0, "a"), (1, "y")):
        delta = processor_pb2.ChoiceDelta(index=index, text=text, token_count=1)
        answer.add(processor_pb2.CompleteResponse(choices=[delta]))
    assert [(c.index, c.text, c.token_count) for c in answer.choices] == [(0, "a", 1), (1, "xy", 2)]
    assert (answer.text, answer.begun, answer.complete) == ("a", True, False)


def test_what_is_asked_of_an_answer_makes_it_one_of_events() -> None:
    events, text = processor_pb2.CHAT_OUTPUT_EVENTS, processor_pb2.CHAT_OUTPUT_UNSPECIFIED
    tool = {"name": "weather"}
    assert chat_start().output == text
    assert chat_start(tools=[tool], events=False).output == text
    assert chat_start(tools=[tool]).output == events
    assert chat_start(tool_choice="none").output == events
    assert chat_start(parallel_tool_calls=False).output == events
    thinking = chat_start(reasoning="low")
    assert (thinking.output, thinking.reasoning.effort) == (events, "low")
    assert not thinking.reasoning.HasField("enabled")
    off = chat_start(reasoning=False).reasoning
    assert off.HasField("enabled")
    assert not off.enabled
