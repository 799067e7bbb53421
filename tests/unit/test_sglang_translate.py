"""The pure half of the SGLang adapter: arguments, chunks, endings, failures."""

from __future__ import annotations

import math
import struct
from typing import Any, cast

import pytest

from millstream_server.control.engine import Role
from millstream_server.engines.sglang.requests.translate import (
    PARAMETER,
    Chunk,
    conclude,
    generate_arguments,
    read_chunk,
    sampling_params,
    translate_exception,
    translate_failure,
)
from millstream_server.generation.output import Finish, FinishReason, TokenLogprob
from millstream_server.generation.request import GenerationRequest, LogprobOptions, Prompt
from millstream_server.generation.sampling import Constraint, ConstraintKind, Sampling
from millstream_server.generation.ticket import Ticket
from millstream_server.runtime.errors import (
    InternalError,
    InvalidRequestError,
    KvTransferError,
    OverloadedError,
    ServingError,
    UnavailableError,
    UnsupportedFeatureError,
)
from millstream_server.runtime.telemetry.trace_context import TraceContext
from tests.support.media import media_requests

_PRIVATE = "/srv/model at 10.0.0.7:8998"


def _request(**changes: Any) -> GenerationRequest:
    values = {
        "engine_id": "a" * 32,
        "prompt": Prompt((5, 6, 7)),
        "sampling": Sampling(max_new_tokens=9),
        **changes,
    }
    return GenerationRequest(**values)


# ---- arguments ----------------------------------------------------------------------------------


def test_neutral_sampling_always_says_how_many_tokens() -> None:
    assert sampling_params(Sampling(max_new_tokens=9), Role.AGGREGATED) == {
        "max_new_tokens": 9,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "ignore_eos": False,
    }


def test_every_knob_arrives() -> None:
    sampling = Sampling(
        max_new_tokens=9,
        top_k=40,
        min_new_tokens=2,
        stop_token_ids=(3, 4),
        seed=-5,
        logit_bias={8: -1.5},
        constraint=Constraint(ConstraintKind.JSON_SCHEMA, "{}"),
    )
    params = sampling_params(sampling, Role.AGGREGATED)
    assert params["top_k"] == 40
    assert params["min_new_tokens"] == 2
    assert params["stop_token_ids"] == [3, 4]
    assert params["sampling_seed"] == -5
    assert params["logit_bias"] == {"8": -1.5}
    assert params["json_schema"] == "{}"


def test_a_huge_top_k_becomes_sglangs_all() -> None:
    params = sampling_params(Sampling(max_new_tokens=1, top_k=2**40), Role.AGGREGATED)
    assert params["top_k"] == 2**30


def test_prefill_makes_one_token_whatever_is_asked() -> None:
    params = sampling_params(Sampling(max_new_tokens=9, min_new_tokens=5), Role.PREFILL)
    assert params["max_new_tokens"] == 1
    assert params["min_new_tokens"] == 1


def test_stop_tokens_that_sglang_would_ignore_are_refused() -> None:
    sampling = Sampling(max_new_tokens=1, stop_token_ids=(3,), ignore_eos=True)
    with pytest.raises(UnsupportedFeatureError) as caught:
        sampling_params(sampling, Role.AGGREGATED)
    assert caught.value.violations[0].field == "sampling.stop_token_ids"


@pytest.mark.parametrize("penalty", [1e-45, 1.2e-38, 9e-7])
def test_a_repetition_penalty_near_0_is_refused(penalty: float) -> None:
    """Logits divided by it are no numbers, and drawing from those ends SGLang's scheduler."""
    with pytest.raises(UnsupportedFeatureError, match=r"a value below 0\.000001") as caught:
        sampling_params(Sampling(max_new_tokens=1, repetition_penalty=penalty), Role.AGGREGATED)
    assert caught.value.violations[0].field == "sampling.repetition_penalty"
    least = struct.unpack("f", struct.pack("f", 1e-6))[0]  # as it comes over the wire
    params = sampling_params(Sampling(max_new_tokens=1, repetition_penalty=least), Role.AGGREGATED)
    assert params["repetition_penalty"] == least


def test_a_plain_request_asks_for_nothing_extra() -> None:
    arguments = generate_arguments(_request(), Role.AGGREGATED)
    assert set(arguments) == {"input_ids", "sampling_params", "rid", "stream"}
    assert arguments["input_ids"] == [5, 6, 7]
    assert arguments["rid"] == "a" * 32
    assert arguments["stream"] is True


@pytest.mark.parametrize(
    ("role", "prompt", "start"),
    [
        (Role.AGGREGATED, False, -1),
        (Role.AGGREGATED, True, 0),
        (Role.PREFILL, True, 0),
        (Role.DECODE, True, -1),
    ],
)
def test_logprob_arguments(role: Role, prompt: bool, start: int) -> None:  # noqa: FBT001
    request = _request(logprobs=LogprobOptions(top=3, prompt=prompt))
    arguments = generate_arguments(request, role)
    assert arguments["return_logprob"] is True
    assert arguments["top_logprobs_num"] == 3
    assert arguments["logprob_start_len"] == start


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_the_ticket_and_the_trace_arrive(role: Role) -> None:
    handoff = Ticket("10.0.0.7", 8998, 2**63 - 1, prefill_dp_rank=2)
    headers = {"traceparent": "00-1-2-01"}
    arguments = generate_arguments(
        _request(ticket=handoff, trace=TraceContext(headers["traceparent"])), role
    )
    assert arguments["bootstrap_host"] == "10.0.0.7"
    assert arguments["bootstrap_port"] == 8998
    assert arguments["bootstrap_room"] == 2**63 - 1
    assert arguments["external_trace_header"] == headers


@pytest.mark.parametrize(
    ("role", "own", "ticket", "ranks"),
    [
        (Role.AGGREGATED, None, None, {}),
        (Role.AGGREGATED, 1, None, {"routed_dp_rank": 1}),
        (Role.PREFILL, 2, 2, {"routed_dp_rank": 2, "disagg_prefill_dp_rank": 2}),
        (Role.DECODE, 1, 2, {"routed_dp_rank": 1, "disagg_prefill_dp_rank": 2}),
        (Role.PREFILL, None, None, {"routed_dp_rank": 0, "disagg_prefill_dp_rank": 0}),
        (Role.DECODE, None, None, {"disagg_prefill_dp_rank": 0}),
    ],
)
def test_ranks(role: Role, own: int | None, ticket: int | None, ranks: dict[str, int]) -> None:
    handoff = Ticket("10.0.0.7", 8998, 1, prefill_dp_rank=ticket) if role.hands_off else None
    arguments = generate_arguments(_request(ticket=handoff, dp_rank=own), role)
    assert {name: arguments[name] for name in arguments if name.endswith("dp_rank")} == ranks


def test_the_adapter_and_the_salt_arrive() -> None:
    arguments = generate_arguments(_request(adapter="poet", cache_salt="s"), Role.AGGREGATED)
    assert (arguments["lora_path"], arguments["cache_salt"]) == ("poet", "s")
    assert not {"lora_path", "cache_salt"} & generate_arguments(_request(), Role.AGGREGATED).keys()


@pytest.mark.parametrize("role", [Role.AGGREGATED, Role.PREFILL, Role.DECODE])
def test_every_engine_is_told_how_many_tokens_were_output(role: Role) -> None:
    params = generate_arguments(_request(resumed_tokens=3), role)["sampling_params"]
    assert cast("Any", params)["custom_params"] == {PARAMETER: 3}
    assert (
        "custom_params" not in cast("Any", generate_arguments(_request(), role))["sampling_params"]
    )


# ---- chunks -------------------------------------------------------------------------------------


def test_a_delta_is_copied() -> None:
    ids = [1, 2]
    chunk = read_chunk({"output_ids": ids, "meta_info": {"completion_tokens": 2}})
    ids.append(3)
    assert chunk.token_ids == (1, 2)
    assert chunk.finish_reason is None


def test_logprobs_are_paired_with_their_alternatives() -> None:
    meta = {
        "finish_reason": {"type": "length", "length": 1},
        "cached_tokens": 4,
        "output_token_logprobs": [(-0.1, 11, None)],
        "output_top_logprobs": [[(-0.1, 11, None), (-2.0, 12, None)]],
        "input_token_logprobs": [(None, 5, None), (-3.0, 6, None)],
        "input_top_logprobs": [None, [(-0.5, 9, None)]],
    }
    chunk = read_chunk({"output_ids": [11], "meta_info": meta})
    assert chunk.logprobs == (TokenLogprob(11, -0.1, ((11, -0.1), (12, -2.0))),)
    assert chunk.cached_tokens == 4
    first, second = chunk.prompt_logprobs
    assert math.isnan(first.logprob)
    assert second == TokenLogprob(6, -3.0, ((9, -0.5),))


def test_tokens_of_an_abort_are_dropped() -> None:
    meta = {
        "finish_reason": {"type": "abort", "message": "Aborted"},
        "completion_tokens": 5,
        "output_token_logprobs": [(-0.1, 11, None)],
    }
    chunk = read_chunk({"output_ids": [11], "meta_info": meta})
    assert chunk.token_ids == ()
    assert chunk.logprobs == ()


# ---- endings ------------------------------------------------------------------------------------


def _conclude(reason: dict[str, Any] | None, *, aborted: bool = False) -> Finish | ServingError:
    chunk = Chunk(token_ids=(), logprobs=(), cached_tokens=2, finish_reason=reason)
    return conclude(chunk, _request(), emitted=4, aborted=aborted)


@pytest.mark.parametrize(
    ("reason", "expected", "matched"),
    [
        ({"type": "stop", "matched": 2}, FinishReason.STOP, 2),
        ({"type": "stop", "matched": [2, 3]}, FinishReason.STOP, None),
        ({"type": "length", "length": 4}, FinishReason.LENGTH, None),
        ({"type": "abort", "message": "Aborted"}, FinishReason.CANCELLED, None),
        (
            {"type": "abort", "message": "Aborted", "status_code": None},
            FinishReason.CANCELLED,
            None,
        ),
    ],
)
def test_good_endings(reason: dict[str, Any], expected: FinishReason, matched: int | None) -> None:
    finish = _conclude(reason)
    assert isinstance(finish, Finish)
    assert finish.reason is expected
    assert finish.matched_token_id == matched
    assert (finish.prompt_tokens, finish.completion_tokens, finish.cached_tokens) == (3, 4, 2)


@pytest.mark.parametrize("kind", ["stop", "abort"])
def test_an_ending_says_which_weights_made_it(kind: str) -> None:
    meta = {"finish_reason": {"type": kind}, "weight_version": "step-7"}
    finish = conclude(
        read_chunk({"output_ids": [1], "meta_info": meta}), _request(), emitted=1, aborted=False
    )
    assert isinstance(finish, Finish)
    assert finish.weight_version == "step-7"


def test_placeholders_have_their_names_and_no_logprob() -> None:
    asked = media_requests.request(media_requests.item("a", 3), length=7)
    reported = tuple(TokenLogprob(0, -1.0 - n, ((9, -0.5),)) for n in range(7))
    chunk = Chunk(
        token_ids=(),
        logprobs=(),
        cached_tokens=0,
        finish_reason={"type": "length"},
        prompt_logprobs=reported,
    )
    finish = conclude(chunk, asked, emitted=0, aborted=False)
    assert isinstance(finish, Finish)
    for position, entry in enumerate(finish.prompt_logprobs):
        assert entry.top == ((9, -0.5),)
        if position in {3, 4}:
            assert entry.token_id == media_requests.IMAGE_TOKEN
            assert math.isnan(entry.logprob)
        else:
            assert entry == reported[position]


def test_our_own_abort_is_cancelled_whatever_sglang_calls_it() -> None:
    reason = {"type": "abort", "message": "KVTransferError: Aborted", "status_code": 500}
    finish = _conclude(reason, aborted=True)
    assert isinstance(finish, Finish)
    assert finish.reason is FinishReason.CANCELLED


def test_an_end_that_came_before_the_abort_stands() -> None:
    finish = _conclude({"type": "length", "length": 4}, aborted=True)
    assert isinstance(finish, Finish)
    assert finish.reason is FinishReason.LENGTH


@pytest.mark.parametrize("reason", [{"type": "stop", "matched": "NaN happened"}, {"type": "new"}])
def test_endings_that_are_faults(reason: dict[str, Any]) -> None:
    assert isinstance(_conclude(reason), InternalError)


# ---- failures -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "status", "expected", "field"),
    [
        ("Failed to compile json_schema grammar", 400, InvalidRequestError, "sampling.constraint"),
        ("Input length (3000 tokens) exceeds the maximum", 400, InvalidRequestError, "token_ids"),
        ("odd", 400, InvalidRequestError, None),
        ("KVTransferError(bootstrap_room=2): timed out", 500, KvTransferError, None),
        ("Lost connection with prefill instance", 500, KvTransferError, None),
        ("timed out in KVPoll.Bootstrapping", 500, KvTransferError, None),
        ("The request queue is full.", 503, OverloadedError, None),
        ("took too long", 503, UnavailableError, None),
        (
            "Grammar accept_token failed for req 1: Key string: transfer",
            500,
            InvalidRequestError,
            "sampling.constraint",
        ),
        ("odd", 500, InternalError, None),
    ],
)
def test_failures_by_class_without_the_vendors_text(
    text: str, status: int, expected: type[ServingError], field: str | None
) -> None:
    error = translate_failure(f"{text} {_PRIVATE}", status)
    assert type(error) is expected
    assert _PRIVATE not in error.message
    assert [violation.field for violation in error.violations] == ([field] if field else [])


@pytest.mark.parametrize("before", ["", "Failed to compile full_assistant_ebnf grammar: "])
def test_a_grammar_that_compiles_too_long_is_refused_with_the_settings_name(before: str) -> None:
    text = f"{before}Grammar preprocessing timed out: req.grammar_key=('json', '{_PRIVATE}')"
    error = translate_failure(text, 400)
    assert type(error) is InvalidRequestError
    assert error.violations[0].field == "sampling.constraint"
    assert "--grammar-timeout-s" in error.message
    assert _PRIVATE not in error.message


class _HttpError(Exception):
    """As fastapi.HTTPException: what SGLang raises."""

    def __init__(self, status_code: int, detail: str) -> None:
        super().__init__(detail)
        self.status_code = status_code
        self.detail = detail


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ValueError(f"is longer than the context length {_PRIVATE}"), InvalidRequestError),
        (ValueError("Duplicate request ID detected: d"), InternalError),
        (TypeError(f"Unexpected keyword argument {_PRIVATE}"), InternalError),
        (_HttpError(500, f"KVTransferError {_PRIVATE}"), KvTransferError),
        (_HttpError(503, "The request queue is full."), OverloadedError),
    ],
)
def test_exceptions(error: Exception, expected: type[ServingError]) -> None:
    translated = translate_exception(error)
    assert type(translated) is expected
    assert _PRIVATE not in translated.message
