"""DecodeService as any Processor may use it: many requests on one stream, columns coming back."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import grpc
import pytest
from google.protobuf.timestamp_pb2 import Timestamp

from millstream.v1 import (
    decode_pb2,
    generation_pb2,
    kv_transfer_pb2,
    sampling_pb2,
    worker_pb2,
)
from millstream_server.control.engine import Role
from millstream_server.generation.ticket import EngineData, Ticket, TicketKey
from millstream_testing.in_process import ALPHABET, CONTEXT_LENGTH, KEY, VOCAB_SIZE, worker
from millstream_testing.waiting import until
from tests.support.wire.failures import refusal
from tests.support.worker.worker_streams import SlotView, Stream, decode_stream

STOP = generation_pb2.FINISH_REASON_STOP
LENGTH = generation_pb2.FINISH_REASON_LENGTH
CANCELLED = generation_pb2.FINISH_REASON_CANCELLED
STEPPING = replace(ALPHABET, step_s=0.005)
ENDLESS = 400
NOBODY = 1
"""A port that nobody listens on."""


# ---- answers and columns


async def test_interleaved_slots_get_the_answers_one_works_out_by_hand() -> None:
    async with worker() as w:
        stream = decode_stream(w.decode)
        await stream.start(3, [7, 41], max_new_tokens=4)
        await stream.start(0, [VOCAB_SIZE - 2], max_new_tokens=3)
        await stream.start(1_048_575, [9], max_new_tokens=9, stop_token_ids=[12])
        a, b, c = await stream.ended(3, 0, 1_048_575)
        await stream.drain()
    assert a.token_ids == [42, 43, 44, 45]
    assert b.token_ids == [VOCAB_SIZE - 1, 0, 1]
    assert c.token_ids == [10, 11, 12]
    assert a.finish is not None
    assert a.finish.reason == LENGTH
    assert not a.finish.HasField("matched_token_id")
    assert a.finish.usage.prompt_tokens == 2
    assert a.finish.usage.completion_tokens == 4
    assert c.finish is not None
    assert c.finish.reason == STOP
    assert c.finish.matched_token_id == 12
    assert c.finish.usage.completion_tokens == 3


async def test_one_frame_holds_a_step_of_all_requests_in_columns() -> None:
    async with worker(replace(ALPHABET, step_s=0.02)) as w:
        stream = decode_stream(w.decode)
        for slot in range(16):
            await stream.start(slot, [slot + 10], max_new_tokens=12)
        slots = await stream.ended(*range(16))
    assert [view.token_ids for view in slots] == [
        list(range(first + 1, first + 13)) for first in range(10, 26)
    ]
    full = [frame for frame in stream.frames if len(frame.slots) == 16]
    assert len(full) >= 8, "steps came in pieces"
    assert all(not frame.token_counts for frame in full)
    assert len(stream.frames) <= 24


async def test_a_reader_that_lags_gets_fewer_larger_frames() -> None:
    async with worker() as w:
        stream = decode_stream(w.decode)
        for slot in range(8):
            await stream.start(slot, [1], max_new_tokens=ENDLESS)
        await w.until_idle(within_s=10)
        slots = await stream.ended(*range(8))
    assert all(view.token_ids == list(range(2, 2 + ENDLESS)) for view in slots)
    assert len(stream.frames) < 8 * ENDLESS


async def test_logprobs_come_one_per_token_and_only_to_those_who_asked() -> None:
    async with worker() as w:
        stream = decode_stream(w.decode)
        options = sampling_pb2.LogprobOptions(top=2, prompt=True)
        await stream.start(0, [5, 6], max_new_tokens=3, logprobs=options)
        await stream.start(1, [5, 6], max_new_tokens=3)
        asked, plain = await stream.ended(0, 1)
    columns = asked.logprobs
    assert [t for c in columns for t in c.token_ids] == asked.token_ids == [7, 8, 9]
    assert [p for c in columns for p in c.logprobs] == [-0.5] * 3
    assert [n for c in columns for n in c.top_counts] == [2] * 3
    assert [t for c in columns for t in c.top_token_ids] == [7, 8, 8, 9, 9, 10]
    assert [p for c in columns for p in c.top_logprobs] == [-0.5, -1.0] * 3
    assert asked.finish is not None
    prompt = asked.finish.prompt_logprobs
    assert list(prompt.token_ids) == [5, 6]
    assert math.isnan(prompt.logprobs[0])
    assert prompt.logprobs[1] == -0.5
    assert plain.logprobs == []
    assert plain.finish is not None
    assert not plain.finish.HasField("prompt_logprobs")


# ---- slots


async def test_a_slot_is_free_again_after_its_end() -> None:
    async with worker() as w:
        stream = decode_stream(w.decode)
        for first in range(10, 60):
            await stream.start(4, [first], max_new_tokens=2)
            (view,) = await stream.ended(4)
            assert view.token_ids == [first + 1, first + 2]


async def test_a_slot_in_use_twice_ends_the_stream_and_all_on_it() -> None:
    async with worker(STEPPING) as w:
        stream = decode_stream(w.decode)
        await stream.start(1, [1], max_new_tokens=ENDLESS)
        await stream.start(2, [1], max_new_tokens=ENDLESS)
        await stream.first_token(2)
        await stream.start(2, [1], max_new_tokens=2)
        failed = await refusal(stream.drain())
        assert failed.code is grpc.StatusCode.INVALID_ARGUMENT
        assert (failed.reason, failed.fields) == ("INVALID_REQUEST", ("start.slot",))
        assert not failed.retryable
        await w.until_idle()


async def test_a_slot_beyond_the_bound_ends_the_stream() -> None:
    async with worker() as w:
        stream = decode_stream(w.decode)
        await stream.start(1_048_576, [1])
        failed = await refusal(stream.drain())
        assert failed.code is grpc.StatusCode.INVALID_ARGUMENT
        assert failed.fields == ("start.slot",)


@pytest.mark.parametrize(
    "constraint",
    [
        sampling_pb2.Constraint(),
        sampling_pb2.Constraint.FromString(b"\x9a\x06\x01x"),  # a grammar of a newer client's
    ],
    ids=["unset", "unknown"],
)
async def test_a_constraint_without_a_known_grammar_is_refused_by_name(
    constraint: sampling_pb2.Constraint,
) -> None:
    async with worker() as w:
        stream = decode_stream(w.decode)
        await stream.start(0, [1], max_new_tokens=ENDLESS)
        sampling = sampling_pb2.SamplingParams(constraint=constraint)
        view = await _refused(stream, [1], ["sampling.constraint"], sampling=sampling)
        assert view.error is not None
        assert "set one of json_schema, regex, ebnf, structural_tag" in view.error.message
        await _healthy(stream)


async def test_an_empty_control_message_ends_the_stream() -> None:
    async with worker() as w:
        stream = decode_stream(w.decode)
        await stream.call.write(decode_pb2.DecodeRequest())
        failed = await refusal(stream.drain())
        assert failed.code is grpc.StatusCode.INVALID_ARGUMENT
        assert (failed.reason, failed.fields) == ("INVALID_REQUEST", ("control",))


# ---- several controls in one message


def _start_of(slot: int, token_ids: list[int], tokens: int) -> generation_pb2.GenerationControl:
    return generation_pb2.GenerationControl(
        start=generation_pb2.StartGeneration(
            slot=slot,
            token_ids=token_ids,
            sampling=sampling_pb2.SamplingParams(max_new_tokens=tokens),
        )
    )


async def test_a_message_may_hold_several_controls() -> None:
    async with worker(STEPPING) as w:
        assert (
            await w.about.GetWorkerInfo(worker_pb2.GetWorkerInfoRequest())
        ).info.batched_controls
        stream = decode_stream(w.decode)
        cancel = generation_pb2.GenerationControl(cancel=generation_pb2.CancelGeneration(slot=1))
        controls = [_start_of(0, [7], 3), _start_of(1, [9], ENDLESS), cancel]
        await stream.call.write(decode_pb2.DecodeRequest(controls=controls))
        whole, cancelled = await stream.ended(0, 1)
        await stream.drain()
    assert whole.token_ids == [8, 9, 10]
    assert cancelled.finish is not None
    assert cancelled.finish.reason == CANCELLED


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (decode_pb2.DecodeRequest(controls=[generation_pb2.GenerationControl()]), "control"),
        (
            decode_pb2.DecodeRequest(
                cancel=generation_pb2.CancelGeneration(slot=1), controls=[_start_of(0, [7], 3)]
            ),
            "controls",
        ),
        (
            decode_pb2.DecodeRequest(controls=[_start_of(0, [7], ENDLESS), _start_of(0, [7], 3)]),
            "start.slot",
        ),
    ],
)
async def test_a_message_of_bad_controls_ends_the_stream(
    request_: decode_pb2.DecodeRequest, field: str
) -> None:
    async with worker(STEPPING) as w:
        stream = decode_stream(w.decode)
        await stream.call.write(request_)
        failed = await refusal(stream.drain())
        assert failed.code is grpc.StatusCode.INVALID_ARGUMENT
        assert failed.fields == (field,)
        await w.until_idle()


# ---- cancel


async def test_cancel_before_the_first_token() -> None:
    async with worker(replace(ALPHABET, prefill_s_per_token=60.0)) as w:
        stream = decode_stream(w.decode)
        await stream.start(0, [1, 2, 3], max_new_tokens=5)
        await w.until_running(1)
        await stream.cancel(0)
        (view,) = await stream.ended(0)
        assert view.finish is not None
        assert view.finish.reason == CANCELLED
        assert view.finish.usage.prompt_tokens == 3
        assert view.finish.usage.completion_tokens == 0
        await w.until_idle()


async def test_cancel_in_the_queue() -> None:
    async with worker(replace(STEPPING, max_running_requests=1)) as w:
        stream = decode_stream(w.decode)
        await stream.start(0, [1], max_new_tokens=ENDLESS)
        await stream.start(1, [1], max_new_tokens=ENDLESS)
        await stream.first_token(0)
        await stream.cancel(1)
        (view,) = await stream.ended(1)
        assert view.finish is not None
        assert view.finish.reason == CANCELLED
        assert view.token_ids == []
        await stream.cancel(0)
        await stream.ended(0)
        await w.until_idle()


async def test_cancel_while_decoding_counts_what_was_sent_and_disturbs_nobody() -> None:
    async with worker(STEPPING) as w:
        stream = decode_stream(w.decode)
        await stream.start(0, [1], max_new_tokens=ENDLESS)
        await stream.start(1, [1], max_new_tokens=30)
        await stream.first_token(0)
        await stream.cancel(0)
        view, other = await stream.ended(0, 1)
        assert view.finish is not None
        assert view.finish.reason == CANCELLED
        assert view.finish.usage.completion_tokens == len(view.token_ids) < 30
        assert other.token_ids == list(range(2, 32))
        assert other.finish is not None
        assert other.finish.reason == LENGTH
        await w.until_idle()


async def test_cancel_twice_late_and_of_unknown_slots_does_nothing() -> None:
    async with worker(STEPPING) as w:
        stream = decode_stream(w.decode)
        await stream.start(0, [1], max_new_tokens=ENDLESS)
        for slot in (0, 0, 5, 2**31):
            await stream.cancel(slot)
        (first,) = await stream.ended(0)
        assert first.finish is not None
        assert first.finish.reason == CANCELLED
        await stream.cancel(0)
        await stream.start(0, [1], max_new_tokens=2)
        (second,) = await stream.ended(0)
        assert second.finish is not None
        assert second.finish.reason == LENGTH
        await stream.cancel(0)
        await stream.drain()


async def test_a_requests_timeout_ends_its_slot_and_no_other() -> None:
    async with worker(STEPPING) as w:
        stream = decode_stream(w.decode)
        await stream.start(0, [1], max_new_tokens=ENDLESS, timeout_s=0.1)
        await stream.start(1, [1], max_new_tokens=60)
        late, healthy = await stream.ended(0, 1)
        assert late.error is not None
        assert late.error.code == grpc.StatusCode.DEADLINE_EXCEEDED.value[0]
        assert late.reason == "DEADLINE_EXCEEDED"
        assert not late.error.retryable
        assert 0 < len(late.token_ids) < 60
        assert healthy.finish is not None
        assert len(healthy.token_ids) == 60
        await w.until_idle()


@pytest.mark.parametrize("timeout_s", [0.0, -1.0])
async def test_a_timeout_that_has_passed_refuses_the_request(timeout_s: float) -> None:
    async with worker() as w:
        stream = decode_stream(w.decode)
        await stream.start(0, [1], timeout_s=timeout_s)
        (view,) = await stream.ended(0)
        assert view.reason == "DEADLINE_EXCEEDED"
        assert view.token_ids == []


async def test_a_timeout_before_the_first_token() -> None:
    async with worker(replace(ALPHABET, prefill_s_per_token=60.0)) as w:
        stream = decode_stream(w.decode)
        await stream.start(0, [1], timeout_s=0.05)
        (view,) = await stream.ended(0)
        assert view.reason == "DEADLINE_EXCEEDED"
        await w.until_idle()


# ---- the end of a stream


@pytest.mark.parametrize("read_first", [False, True])
async def test_cancelling_the_rpc_stops_all_of_its_requests(read_first: bool) -> None:  # noqa: FBT001
    async with worker(STEPPING) as w:
        other = decode_stream(w.decode)
        await other.start(0, [1], max_new_tokens=100)
        stream = decode_stream(w.decode)
        for slot in range(20):
            await stream.start(slot, [1], max_new_tokens=ENDLESS)
        await w.until_running(21)
        if read_first:
            await stream.first_token(19)
        stream.call.cancel()
        await w.until_running(1)
        (view,) = await other.ended(0)
        assert len(view.token_ids) == 100
        await w.until_idle()


async def test_a_client_that_stops_reading_and_leaves_frees_the_engine() -> None:
    """Then the handler is suspended in a write, not in its own code."""
    async with worker(replace(ALPHABET, context_length=1 << 20)) as w:
        stream = decode_stream(w.decode)
        for slot in range(200):
            await stream.start(slot, [1], max_new_tokens=1 << 18)

        async def runs() -> bool:
            return (await w.engine.load()).running_requests > 0

        await until(runs)
        await asyncio.sleep(0.3)  # fill the flow-control window; less only tests less
        stream.call.cancel()
        await w.until_idle()


async def test_half_close_waits_for_what_runs() -> None:
    async with worker(STEPPING) as w:
        stream = decode_stream(w.decode)
        await stream.start(0, [1], max_new_tokens=20)
        await stream.start(1, [1], max_new_tokens=10)
        await stream.drain()
        assert await stream.call.code() is grpc.StatusCode.OK
        assert len(stream.slots[0].token_ids) == 20
        assert len(stream.slots[1].token_ids) == 10


async def test_half_close_of_an_empty_stream_ends_it() -> None:
    async with worker() as w:
        stream = decode_stream(w.decode)
        await stream.drain()
        assert await stream.call.code() is grpc.StatusCode.OK


# ---- refusals, each beside a healthy request that must not notice


async def _refused(
    stream: Stream, token_ids: list[int], fields: list[str], **start: Any
) -> SlotView:
    await stream.start(7, token_ids, **start)
    (view,) = await stream.ended(7)
    assert view.error is not None, view.finish
    assert view.error.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    assert view.fields == fields
    assert all(violation.description for violation in view.error.violations)
    assert view.error.message
    assert not view.error.retryable
    assert not view.error.HasField("retry_delay")
    assert view.token_ids == []
    return view


async def _healthy(stream: Stream) -> None:
    (view,) = await stream.ended(0)
    assert view.token_ids == list(range(2, 2 + ENDLESS))
    assert view.finish is not None
    assert view.finish.reason == LENGTH


BAD_REQUESTS: list[tuple[str, list[int], list[str], dict[str, Any]]] = [
    ("empty prompt", [], ["token_ids"], {}),
    ("token at the bound", [1, VOCAB_SIZE], [f"token_ids[{1}]"], {}),
    ("token far off", [2**32 - 1], ["token_ids[0]"], {}),
    ("too long", [1] * CONTEXT_LENGTH, ["token_ids"], {}),
    ("much too long", [1] * 4 * CONTEXT_LENGTH, ["token_ids"], {}),
    ("answer too long", [1] * 500, ["sampling.max_new_tokens"], {"max_new_tokens": 13}),
    ("no answer", [1], ["sampling.max_new_tokens"], {"max_new_tokens": 0}),
    ("negative temperature", [1], ["sampling.temperature"], {"temperature": -1.0}),
    ("NaN temperature", [1], ["sampling.temperature"], {"temperature": math.nan}),
    ("infinite temperature", [1], ["sampling.temperature"], {"temperature": math.inf}),
    ("top_p 0", [1], ["sampling.top_p"], {"top_p": 0.0}),
    ("top_p above 1", [1], ["sampling.top_p"], {"top_p": 1.5}),
    ("NaN top_p", [1], ["sampling.top_p"], {"top_p": math.nan}),
    ("NaN min_p", [1], ["sampling.min_p"], {"min_p": math.nan}),
    ("penalty", [1], ["sampling.presence_penalty"], {"presence_penalty": 2.5}),
    ("NaN penalty", [1], ["sampling.frequency_penalty"], {"frequency_penalty": math.nan}),
    ("repetition 0", [1], ["sampling.repetition_penalty"], {"repetition_penalty": 0.0}),
    ("seed", [1], ["sampling.seed"], {"seed": 2**63}),
    ("min above max", [1], ["sampling.min_new_tokens"], {"min_new_tokens": 5, "max_new_tokens": 4}),
    ("stop token", [1], ["sampling.stop_token_ids[1]"], {"stop_token_ids": [1, VOCAB_SIZE]}),
    ("bias token", [1], ["sampling.logit_bias"], {"logit_bias": {VOCAB_SIZE: 1.0}}),
    ("NaN bias", [1], ["sampling.logit_bias"], {"logit_bias": {1: math.nan}}),
    ("top logprobs", [1], ["logprobs.top"], {"logprobs": sampling_pb2.LogprobOptions(top=21)}),
    (
        "two at once",
        [],
        ["token_ids", "sampling.top_p"],
        {"top_p": 2.0},
    ),
]


async def test_bad_requests_are_refused_by_field_and_disturb_nobody() -> None:
    async with worker(replace(STEPPING, step_s=0.001)) as w:
        stream = decode_stream(w.decode)
        await stream.start(0, [1], max_new_tokens=ENDLESS)
        for what, token_ids, fields, start in BAD_REQUESTS:
            view = await _refused(stream, token_ids, fields, **start)
            assert view.reason == "INVALID_REQUEST", what
        await _healthy(stream)
        await w.until_idle()


async def test_a_feature_the_engine_lacks_is_named_not_ignored() -> None:
    async with worker() as w:
        stream = decode_stream(w.decode)
        await stream.start(0, [1], max_new_tokens=ENDLESS)
        constraint = sampling_pb2.Constraint(regex="a+")
        sampling = sampling_pb2.SamplingParams(constraint=constraint)
        view = await _refused(stream, [1], ["sampling.constraint"], sampling=sampling)
        assert view.reason == "UNSUPPORTED_FEATURE"
        await _healthy(stream)


async def test_many_violations_are_reported_in_a_bounded_message() -> None:
    async with worker() as w:
        stream = decode_stream(w.decode)
        await stream.start(7, [1], logit_bias={VOCAB_SIZE + i: 1.0 for i in range(5000)})
        (view,) = await stream.ended(7)
        assert view.error is not None
        assert set(view.fields) == {"sampling.logit_bias"}
        assert view.error.ByteSize() < 4096


# ---- tickets


def _ticket(**changes: Any) -> Ticket:
    ticket = KEY.mint("127.0.0.1", NOBODY)
    return replace(ticket, **changes)


def _resigned(**changes: Any) -> Ticket:
    ticket = _ticket(**changes)
    return replace(ticket, signature=KEY._sign(ticket))


SIMULATED = EngineData("simulated", b"data")

BAD_TICKETS: list[tuple[str, Callable[[], Any], str]] = [
    ("missing", lambda: None, "ticket"),
    ("unsigned", lambda: _ticket(signature=b""), "ticket.signature"),
    ("forged", lambda: TicketKey(bytes(32)).mint("127.0.0.1", NOBODY), "ticket.signature"),
    ("another host", lambda: _ticket(bootstrap_host="127.0.0.2"), "ticket.signature"),
    ("another port", lambda: _ticket(bootstrap_port=10), "ticket.signature"),
    ("another room", lambda: _ticket(room=1), "ticket.signature"),
    ("another rank", lambda: _ticket(prefill_dp_rank=0), "ticket.signature"),
    ("prolonged", lambda: _ticket(expires_at_ms=2**45), "ticket.signature"),
    ("data nobody signed", lambda: _ticket(engine_data=SIMULATED), "ticket.signature"),
    (
        "other data than was signed",
        lambda: replace(_resigned(engine_data=SIMULATED), engine_data=EngineData("simulated", b"")),
        "ticket.signature",
    ),
    (
        "of another kind",
        lambda: _resigned(engine_data=EngineData("sglang.nixl", b"")),
        "ticket.engine_data.kind",
    ),
    (
        "too much data",
        lambda: _resigned(engine_data=EngineData("simulated", bytes(65537))),
        "ticket.engine_data.data",
    ),
    ("expired", lambda: _resigned(expires_at_ms=1), "ticket.expires_at"),
    ("unspeakable port", lambda: _ticket(bootstrap_port=70000), "ticket.signature"),
    ("before 1970", lambda: _ticket(expires_at_ms=-5), "ticket.signature"),
    (
        "no time at all",
        lambda: kv_transfer_pb2.KvHandoffTicket(expires_at=Timestamp(seconds=2**62)),
        "ticket.signature",
    ),
]


async def test_bad_tickets_fail_one_request_each() -> None:
    config = replace(ALPHABET, role=Role.DECODE)
    async with worker(config) as w:
        stream = decode_stream(w.decode)
        await stream.start(0, [1], ticket=KEY.mint("127.0.0.1", NOBODY), max_new_tokens=3)
        for what, make, field in BAD_TICKETS:
            view = await _refused(stream, [1], [field], ticket=make())
            assert view.reason == "INVALID_REQUEST", what
        (unreachable,) = await stream.ended(0)
        assert unreachable.reason == "KV_TRANSFER_FAILED"
        assert unreachable.error is not None
        assert unreachable.error.code == grpc.StatusCode.UNAVAILABLE.value[0]
        assert unreachable.error.retryable
        await w.until_idle()


async def test_a_ticket_is_good_once() -> None:
    async with worker(replace(ALPHABET, role=Role.DECODE)) as w:
        stream = decode_stream(w.decode)
        ticket = KEY.mint("127.0.0.1", NOBODY)
        await stream.start(0, [1], ticket=ticket, max_new_tokens=3)
        await _refused(stream, [1], ["ticket.room"], ticket=ticket)


async def test_a_ticket_that_a_bad_request_carried_is_still_good() -> None:
    async with worker(replace(ALPHABET, role=Role.DECODE)) as w:
        stream = decode_stream(w.decode)
        ticket = KEY.mint("127.0.0.1", NOBODY)
        await _refused(stream, [], ["token_ids"], ticket=ticket)
        await stream.start(0, [1], ticket=ticket, max_new_tokens=3)
        (view,) = await stream.ended(0)
        assert view.reason == "KV_TRANSFER_FAILED"


async def test_an_aggregated_worker_takes_no_ticket() -> None:
    async with worker() as w:
        stream = decode_stream(w.decode)
        await stream.start(0, [1], max_new_tokens=ENDLESS)
        await _refused(stream, [1], ["ticket"], ticket=_ticket())
        await _healthy(stream)


# ---- sizes and bytes


async def test_a_start_of_ten_megabytes_is_one_requests_error() -> None:
    async with worker() as w:
        stream = decode_stream(w.decode)
        await stream.start(0, [1], max_new_tokens=ENDLESS)
        await _refused(stream, [2**27] * 2_100_000, ["token_ids"])
        await _healthy(stream)


async def test_bytes_that_are_no_message_end_the_stream_as_the_callers_fault() -> None:
    async with worker() as w:
        method = w.channel.stream_stream("/millstream.v1.DecodeService/Decode")
        call = method()
        await call.write(b"\x0a\xff\xff\xff")
        failed = await refusal(call)
        assert failed.code is grpc.StatusCode.INTERNAL
        assert "millstream.v1.DecodeRequest" in failed.message


# ---- workers that take nothing now


async def test_a_draining_worker_refuses_the_new_and_finishes_the_old() -> None:
    async with worker(STEPPING) as w:
        stream = decode_stream(w.decode)
        await stream.start(0, [1], max_new_tokens=400)
        await stream.first_token(0)
        draining = asyncio.ensure_future(w.host.drain(0.5, 20))
        await stream.until(lambda: stream.frames[-1].draining)
        await stream.start(1, [1], max_new_tokens=2)  # as if it had crossed the news on the way
        (taken,) = await stream.ended(1)
        assert taken.token_ids == [2, 3]
        await until(lambda: w.host.work.refusing)
        await stream.start(1, [1], max_new_tokens=2)  # and had been long about it
        (late,) = await stream.ended(1)
        assert late.token_ids == [2, 3]
        newcomer = decode_stream(w.decode)
        await newcomer.start(1, [1], max_new_tokens=2)
        (refused,) = await newcomer.ended(1)
        assert newcomer.frames[0].draining
        assert refused.error is not None
        assert refused.error.code == grpc.StatusCode.UNAVAILABLE.value[0]
        assert refused.reason == "WORKER_DRAINING"
        assert refused.error.retryable
        assert not draining.done()
        (running,) = await stream.ended(0)
        assert len(running.token_ids) == 400
        assert sum(frame.draining for frame in stream.frames) == 1
        unknown = await refusal(w.about.GetWorkerInfo(worker_pb2.GetWorkerInfoRequest()))
        assert (unknown.code, unknown.reason) == (grpc.StatusCode.UNAVAILABLE, "WORKER_DRAINING")
        await newcomer.drain()
        assert not draining.done()
        await stream.drain()
        assert await asyncio.wait_for(draining, 1)


async def test_a_loading_worker_says_when_to_retry() -> None:
    async with worker(loaded=False) as w:
        stream = decode_stream(w.decode)
        await stream.start(0, [1])
        (early,) = await stream.ended(0)
        assert early.error is not None
        assert early.error.code == grpc.StatusCode.UNAVAILABLE.value[0]
        assert early.reason == "UNAVAILABLE"
        assert early.error.retryable
        assert early.error.retry_delay.ToMilliseconds() == 1000
        await w.load()
        await stream.start(0, [1], max_new_tokens=2)
        (view,) = await stream.ended(0)
        assert view.token_ids == [2, 3]


async def test_an_engine_that_closes_fails_what_runs_on_it() -> None:
    async with worker(STEPPING) as w:
        stream = decode_stream(w.decode)
        for slot in range(3):
            await stream.start(slot, [1], max_new_tokens=ENDLESS)
        await stream.first_token(2)
        await w.engine.close()
        for view in await stream.ended(0, 1, 2):
            assert view.reason == "ENGINE_FAILED"
            assert view.error is not None
            assert view.error.retryable
