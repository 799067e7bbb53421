"""Plain types to protobuf and back, on the worker stream: nothing is lost, unset isn't zero."""

from __future__ import annotations

import json
import math
import time
from dataclasses import asdict, replace
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration

from millstream.v1 import generation_pb2, processor_pb2, sampling_pb2
from millstream_server.generation import wire as convert
from millstream_server.generation.output import Finish, FinishReason, TokenLogprob
from millstream_server.generation.request import GenerationRequest, LogprobOptions, Prompt
from millstream_server.generation.sampling import MAX_BIASES, Constraint, ConstraintKind, Sampling
from millstream_server.generation.ticket import Ticket
from millstream_server.processor import convert as from_client
from millstream_server.processor.http.requests import chat_options, read_chat
from millstream_server.processor.requests import sampling_of
from millstream_server.processor.text.model_files import GenerationDefaults
from millstream_server.runtime.errors import InvalidRequestError
from millstream_server.runtime.telemetry.trace_context import TraceContext
from tests.support.processor.generation_messages import sampling_to_proto, start_to_proto

# Floats that a 32-bit field holds exactly.
SAMPLINGS = {
    "neutral": Sampling(max_new_tokens=1),
    "all": Sampling(
        max_new_tokens=7,
        temperature=0.5,
        top_p=0.25,
        top_k=3,
        min_p=0.125,
        frequency_penalty=-1.5,
        presence_penalty=1.5,
        repetition_penalty=1.25,
        min_new_tokens=2,
        stop_token_ids=(5, 5, 6),
        ignore_eos=True,
        seed=2**63 - 1,
        logit_bias={1: -100.0, 2: 0.5},
        constraint=Constraint(ConstraintKind.REGEX, "a+"),
    ),
    "zeros": Sampling(max_new_tokens=1, temperature=0.0, top_p=0.0, repetition_penalty=0.0, seed=0),
    "json": Sampling(
        max_new_tokens=1, constraint=Constraint(ConstraintKind.JSON_SCHEMA, '{"a": 1}')
    ),
    "ebnf": Sampling(max_new_tokens=1, constraint=Constraint(ConstraintKind.EBNF, "root ::= x")),
    "tag": Sampling(max_new_tokens=1, constraint=Constraint(ConstraintKind.STRUCTURAL_TAG, "{}")),
    "empty constraint": Sampling(max_new_tokens=1, constraint=Constraint(ConstraintKind.EBNF, "")),
}


def _wire(message: Any) -> Any:
    """Send it through bytes."""
    return type(message).FromString(message.SerializeToString())


@pytest.mark.parametrize("name", SAMPLINGS)
def test_sampling_survives(name: str) -> None:
    sampling = SAMPLINGS[name]
    message = _wire(sampling_to_proto(sampling))
    assert convert.sampling_from_proto(message, unset_max_new_tokens=99) == sampling


def test_too_many_biases_are_refused_before_they_are_read() -> None:
    message = sampling_pb2.SamplingParams(logit_bias=dict.fromkeys(range(MAX_BIASES + 1), 1.0))
    with pytest.raises(InvalidRequestError, match="logit_bias: at most 20000 tokens"):
        convert.sampling_fields(message, "sampling")
    raw = json.dumps(dict.fromkeys(map(str, range(MAX_BIASES + 1)), 1)).encode()
    body = b'{"messages": [{"role": "user", "content": "hi"}], "logit_bias": %s}' % raw
    with pytest.raises(InvalidRequestError, match="logit_bias: at most 20000 tokens"):
        chat_options(read_chat(body)[0])


def test_unset_takes_the_models_default_and_an_explicit_zero_does_not() -> None:
    defaults = GenerationDefaults(temperature=0.7, top_p=0.8, top_k=20, min_p=0.1)
    given = defaults.given(frozenset({"sampling.min_p"}))
    unset = convert.sampling_fields(sampling_pb2.SamplingParams(), "")
    assert sampling_of(unset, given, 50) == Sampling(
        max_new_tokens=50, temperature=0.7, top_p=0.8, top_k=20
    )
    zeros = sampling_pb2.SamplingParams(
        temperature=0, top_p=0, top_k=0, min_p=0, max_new_tokens=0, seed=0, ignore_eos=False
    )
    read = sampling_of(convert.sampling_fields(_wire(zeros), ""), given, 50)
    assert (read.temperature, read.top_p, read.top_k, read.min_p) == (0, 0, 0, 0)
    assert (read.max_new_tokens, read.seed, read.ignore_eos) == (0, 0, False)


def test_a_later_turns_answer_is_bounded_by_what_the_context_leaves() -> None:
    asked = {"max_new_tokens": 99}
    assert sampling_of(asked, {}, 50).max_new_tokens == 99
    assert sampling_of(asked, {}, 50, fit=True).max_new_tokens == 50
    assert sampling_of(asked, {}, -5, fit=True).max_new_tokens == 1


def test_a_seed_is_drawn_with_the_request_where_all_workers_take_one() -> None:
    drawn = {sampling_of({}, {}, 50, seeded=True).seed for _ in range(9)}
    assert None not in drawn
    assert len(drawn) == 9, "each request's own"
    assert sampling_of({"seed": 0}, {}, 50, seeded=True).seed == 0, "the client's stays"
    assert sampling_of({"temperature": 0.0}, {}, 50, seeded=True).seed is None, "greedy needs none"
    assert sampling_of({}, {}, 50).seed is None, "an engine would refuse it"


def test_a_constraint_of_no_known_kind_is_refused_by_name() -> None:
    message = sampling_pb2.SamplingParams(constraint=sampling_pb2.Constraint())
    with pytest.raises(InvalidRequestError) as caught:
        convert.sampling_fields(message, "start.options.sampling")
    assert caught.value.violations[0].field == "start.options.sampling.constraint"


def test_every_knob_of_the_contract_is_read() -> None:
    """A field added to the proto and forgotten here would be ignored in silence."""
    known = {f.name for f in sampling_pb2.SamplingParams.DESCRIPTOR.fields}
    assert known == set(Sampling.__dataclass_fields__)


def test_every_option_of_the_contract_is_read() -> None:
    message = processor_pb2.GenerationOptions(
        sampling=sampling_pb2.SamplingParams(top_k=3),
        stop=["x"],
        n=2,
        logprobs=sampling_pb2.LogprobOptions(top=1),
        min_interval=Duration(seconds=1),
        return_token_ids=True,
        include_special_tokens=True,
        priority=processor_pb2.REQUEST_PRIORITY_HIGH,
        adapter="a",
        session="s",
        cache_salt="c",
    )
    assert {field.name for field, _ in message.ListFields()} == set(
        message.DESCRIPTOR.fields_by_name
    )
    read, unset = (
        asdict(from_client.options_from_proto(one, ""))
        for one in (message, processor_pb2.GenerationOptions())
    )
    same = [name for name in read if read[name] == unset[name]]
    assert same == ["path", "seed_left_out"], "what no client says"


def test_greedy_is_sent() -> None:
    """0 is proto3's own default for a float; it must be there explicitly."""
    message = _wire(sampling_to_proto(Sampling(max_new_tokens=1, temperature=0.0)))
    assert message.HasField("temperature")
    assert not message.HasField("top_p")


def _start(**changes: Any) -> GenerationRequest:
    return GenerationRequest(
        **{
            "request_id": "r",
            "prompt": Prompt([1, 2, 2**32 - 1]),
            "sampling": SAMPLINGS["all"],
            **changes,
        }
    )


TICKET = Ticket(
    bootstrap_host="h",
    bootstrap_port=1,
    room=2**63 - 1,
    prefill_dp_rank=None,
    expires_at_ms=1_800_000_000_123,
    signature=b"\xff\x00",
)
STARTS = {
    "plain": _start(),
    "logprobs": _start(logprobs=LogprobOptions()),
    "more logprobs": _start(logprobs=LogprobOptions(top=3, prompt=True)),
    "ticket": _start(ticket=TICKET),
    "rank 0": _start(
        ticket=Ticket(
            bootstrap_host="h", bootstrap_port=1, room=0, prefill_dp_rank=0, expires_at_ms=0
        )
    ),
    "trace": _start(trace=TraceContext("00-a-b-01", "x=y", "k=v")),
    "timeout": _start(deadline_s=101.25),
    "no time left": _start(deadline_s=100.0),
    "adapter, rank and salt": _start(adapter="a", dp_rank=0, cache_salt="s"),
    "resumed": _start(resumed_tokens=1),
}


@pytest.mark.parametrize("name", STARTS)
def test_a_start_survives(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 100.0)
    start = STARTS[name]
    message = _wire(start_to_proto(9, start))
    assert message.slot == 9
    read = convert.start_from_proto(message, context_length=100)
    assert read.engine_id != start.engine_id, "each end has an id of its own"
    assert replace(read, engine_id=start.engine_id) == start


def test_an_unset_max_new_tokens_becomes_what_the_context_leaves() -> None:
    message = generation_pb2.StartGeneration(token_ids=[1] * 30)
    assert convert.start_from_proto(message, 100).sampling.max_new_tokens == 70
    assert convert.start_from_proto(message, 30).sampling.max_new_tokens == 1


def test_an_absurd_timeout_is_a_long_one_that_can_be_sent_on() -> None:
    message = generation_pb2.StartGeneration(token_ids=[1])
    message.timeout.seconds = 2**63 - 1
    request = convert.start_from_proto(message, 100)
    assert start_to_proto(0, request).timeout.seconds > 365 * 86_400


LOGPROBS = {
    "none": (),
    "chosen": (TokenLogprob(1, -0.5), TokenLogprob(2, -1.0)),
    "top": (TokenLogprob(1, -0.5, ((1, -0.5), (7, -2.0))), TokenLogprob(2, -1.0, ((2, -1.0),))),
    "mixed": (TokenLogprob(1, -0.5), TokenLogprob(2, -1.0, ((2, -1.0), (3, -1.5)))),
}


@pytest.mark.parametrize("name", LOGPROBS)
def test_logprobs_survive(name: str) -> None:
    entries = LOGPROBS[name]
    message = _wire(convert.logprobs_to_proto(entries))
    assert tuple(convert.logprobs_from_proto(message)) == entries
    assert bool(message.top_counts) == any(entry.top for entry in entries)


def test_a_missing_logprob_is_nan_on_the_wire_too() -> None:
    message = _wire(convert.logprobs_to_proto([TokenLogprob(1, math.nan)]))
    (entry,) = convert.logprobs_from_proto(message)
    assert math.isnan(entry.logprob)


@pytest.mark.parametrize(
    "finish",
    [
        Finish(reason=FinishReason.LENGTH, prompt_tokens=3, completion_tokens=4, cached_tokens=2),
        Finish(reason=FinishReason.STOP, prompt_tokens=1, completion_tokens=1, matched_token_id=0),
        Finish(reason=FinishReason.STOP, prompt_tokens=1, completion_tokens=1),
        Finish(
            reason=FinishReason.LENGTH, prompt_tokens=1, completion_tokens=1, weight_version="v2"
        ),
        Finish(
            reason=FinishReason.CANCELLED,
            prompt_tokens=2,
            completion_tokens=0,
            prompt_logprobs=LOGPROBS["chosen"],
        ),
    ],
)
def test_a_finish_survives(finish: Finish) -> None:
    written = generation_pb2.SlotFinish(slot=3)
    convert.write_finish(written, finish)
    message = _wire(written)
    assert message.slot == 3
    assert convert.finish_from_proto(message) == finish


def test_every_finish_reason_of_an_engine_has_its_name_in_the_contract() -> None:
    for reason in FinishReason:
        name = generation_pb2.FinishReason.Name(convert.finish_reason_to_proto(reason))
        assert name == f"FINISH_REASON_{reason.name}"


def test_every_grammar_of_the_contract_is_known() -> None:
    grammars = sampling_pb2.Constraint.DESCRIPTOR.oneofs_by_name["grammar"].fields
    assert {kind.value for kind in ConstraintKind} == {field.name for field in grammars}


@pytest.mark.parametrize(
    ("lengths", "kept"),
    [((55, 10, 10), (55, 10, 10)), ((129, 10, 10), (0, 0, 0)), ((55, 5000, 9000), (55, 0, 0))],
)
def test_a_trace_context_that_is_too_long_is_not_kept(
    lengths: tuple[int, int, int], kept: tuple[int, int, int]
) -> None:
    parts = dict(zip(("traceparent", "tracestate", "baggage"), lengths, strict=True))
    trace = generation_pb2.TraceContext(**{name: "x" * length for name, length in parts.items()})
    found = convert.start_from_proto(generation_pb2.StartGeneration(trace=trace), 10).trace
    assert (len(found.traceparent), len(found.tracestate), len(found.baggage)) == kept
