"""One trace of a chat: RPC → turn → legs → workers → engine; and the metrics of the same points."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Sequence
from dataclasses import replace

import grpc
import pytest
from opentelemetry.trace import SpanKind, StatusCode

from millstream.v1 import decode_pb2, decode_pb2_grpc, generation_pb2
from millstream_server.control.engine import Role
from millstream_server.generation.ticket import TicketKey
from millstream_server.links.grpc_channel import GrpcChannel
from millstream_server.links.link import WorkerLink
from millstream_server.processor.text.tokenizer import TextModel
from millstream_server.runtime.telemetry.trace_context import NOT_TRACED, TraceContext, incoming
from millstream_server.runtime.telemetry.tracing import trace_id
from millstream_testing.in_process import ALPHABET, MODEL
from millstream_testing.waiting import until
from tests.support.processor.chats import (
    CANCEL,
    Conversation,
    chat,
    completion,
    gather,
    options,
    start,
    user_turn,
)
from tests.support.processor.traced_suite import traced_suite, traced_worker
from tests.support.telemetry.logged import events
from tests.support.telemetry.spans import (
    INCOMING,
    SPAN_ID,
    TRACE_ID,
    TRACEPARENT,
    Samples,
    SpanLog,
    attributes,
    id_of,
    parent_of,
    trace_of,
)
from tests.support.wire.failures import refusal

PAIR = (Role.PREFILL, Role.DECODE)
RPC = "millstream.v1.ProcessorService/Chat"
SLOW = replace(ALPHABET, step_s=0.02)


# ---- the tree


@pytest.mark.parametrize("roles", [(Role.AGGREGATED,), PAIR])
async def test_a_chat_is_one_trace_from_the_client_to_the_engines(
    text_model: TextModel, roles: Sequence[Role]
) -> None:
    spans = SpanLog()
    async with traced_suite(text_model, spans, roles=roles) as suite:
        conversation = Conversation(suite.stub, metadata=INCOMING)
        await conversation.say(start("hi", opts=options(5)))
        await conversation.end()
        await spans.until_ended(2 + 2 * len(roles))
        handed_on = [request for w in suite.workers for request in w.engine.requests]
    assert {trace_of(span) for span in spans.ended} == {TRACE_ID}
    rpc, turn = spans.named(RPC), spans.named(f"chat {MODEL}")
    assert f"{parent_of(rpc):016x}" == SPAN_ID
    assert parent_of(turn) == id_of(rpc)
    for name in ("prefill", "decode")[2 - len(roles) :]:
        leg, served = spans.named(name), spans.named(f"{name} {MODEL}")
        assert parent_of(leg) == id_of(turn)
        assert leg.kind is SpanKind.CLIENT
        assert parent_of(served) == id_of(leg)
        assert served.kind is SpanKind.SERVER
        context = (f"00-{TRACE_ID}-{id_of(served):016x}-01", "vendor=1")
        assert context in [(r.trace.traceparent, r.trace.tracestate) for r in handed_on]
    assert {span.status.status_code for span in spans.ended} == {StatusCode.UNSET}


async def test_the_turn_says_what_was_asked_and_used_and_not_what_was_said(
    text_model: TextModel,
) -> None:
    spans = SpanLog()
    asked = options(
        5, temperature=0.5, top_p=0.9, top_k=7, seed=3, presence_penalty=0.25, stop=["secret stop"]
    )
    async with traced_suite(text_model, spans) as suite:
        await chat(suite.stub, "a secret", opts=asked, request_id="r-1")
        await spans.until_ended(4)
        worker = suite.workers[0]
    said = dict(attributes(spans.named(f"chat {MODEL}")))
    assert 0 < float(str(said.pop("gen_ai.response.time_to_first_chunk"))) < 10
    prompt = len(worker.engine.requests[0].token_ids)
    assert said == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "simulated",
        "gen_ai.request.model": MODEL,
        "gen_ai.response.model": MODEL,
        "gen_ai.response.id": "r-1",
        "gen_ai.request.max_tokens": 5,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": pytest.approx(0.9),
        "gen_ai.request.top_k": 7,
        "gen_ai.request.presence_penalty": 0.25,
        "gen_ai.request.seed": 3,
        "gen_ai.usage.input_tokens": prompt,
        "gen_ai.usage.output_tokens": 5,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.response.finish_reasons": ("length",),
        "millstream.turn": 1,
    }
    leg = attributes(spans.named("decode"))
    assert f"{leg['server.address']}:{leg['server.port']}" == worker.address
    assert dict(attributes(spans.named(f"decode {MODEL}"))) == {
        "gen_ai.operation.name": "decode",
        "gen_ai.request.model": MODEL,
        "millstream.role": "aggregated",
        "millstream.request_id": "r-1",
        "gen_ai.usage.input_tokens": prompt,
        "gen_ai.usage.output_tokens": 5,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.response.finish_reasons": ("length",),
    }
    assert not any("secret" in str(attributes(span)) for span in spans.ended)


async def test_every_turn_and_every_choice_has_its_spans(text_model: TextModel) -> None:
    spans = SpanLog()
    async with traced_suite(text_model, spans) as suite:
        conversation = Conversation(suite.stub)
        await conversation.say(start("hi", opts=options(2)))
        await conversation.answer(1)
        assert len(await spans.until_ended(3)) == 3  # the first turn's, while the RPC goes on
        await conversation.say(user_turn("more"))
        await conversation.end()
        await spans.until_ended(7)
        await gather(suite.stub.Complete(completion("A", options(3, n=2))))
        await spans.until_ended(7 + 6)
    turns = [span for span in spans.ended if span.name == f"chat {MODEL}"]
    assert [attributes(turn)["millstream.turn"] for turn in turns] == [1, 2]
    assert {parent_of(turn) for turn in turns} == {id_of(spans.named(RPC))}
    one = spans.named(f"text_completion {MODEL}")
    assert attributes(one)["gen_ai.request.choice.count"] == 2
    assert attributes(one)["gen_ai.response.finish_reasons"] == ("length", "length")
    legs = [s for s in spans.ended if s.name == "decode" and parent_of(s) == id_of(one)]
    assert len(legs) == 2


# ---- every way out ends every span, once


async def test_a_cancelled_turn(text_model: TextModel) -> None:
    spans = SpanLog()
    async with traced_suite(text_model, spans, roles=PAIR, config=SLOW) as suite:
        conversation = Conversation(suite.stub)
        await conversation.say(start("hi", opts=options(300)))
        await conversation.read()
        await conversation.say(CANCEL)
        await conversation.end()
        await spans.until_ended(6)
    turn = spans.named(f"chat {MODEL}")
    assert attributes(turn)["gen_ai.response.finish_reasons"] == ("cancelled",)
    assert "error.type" not in attributes(turn)
    assert turn.status.status_code is StatusCode.UNSET


@pytest.mark.parametrize("read_first", [True, False])
async def test_an_abandoned_turn(text_model: TextModel, *, read_first: bool) -> None:
    spans = SpanLog()
    async with traced_suite(text_model, spans, roles=PAIR, config=SLOW) as suite:
        conversation = Conversation(suite.stub)
        await conversation.say(start("hi", opts=options(300)))
        if read_first:
            await conversation.read()
        await until(lambda: all(w.engine.requests for w in suite.workers))
        conversation.call.cancel()
        await spans.until_ended(6)
        await until(lambda: not suite.core.work.count)
    assert attributes(spans.named(RPC))["error.type"] == "CANCELLED"
    turn = spans.named(f"chat {MODEL}")
    assert attributes(turn)["error.type"] == "ABANDONED"
    assert turn.status.status_code is StatusCode.ERROR
    for name in (f"prefill {MODEL}", f"decode {MODEL}"):
        assert "gen_ai.response.finish_reasons" in attributes(spans.named(name))
    said = attributes(spans.named(f"decode {MODEL}"))
    assert said["gen_ai.response.finish_reasons"] == ("cancelled",)


async def test_a_worker_that_is_lost(text_model: TextModel) -> None:
    spans, measured = SpanLog(), Samples()
    async with traced_suite(text_model, spans, config=SLOW) as suite:
        conversation = Conversation(suite.stub)
        await conversation.say(start("hi", opts=options(300)))
        await conversation.read()
        await suite.workers[0].server.stop(0)
        failed = await refusal(conversation.call)
        await spans.until_ended(4)
        assert measured.grown("millstream_workers_connected") == 0
    assert failed.reason == "WORKER_LOST"
    for name in (f"chat {MODEL}", "decode"):
        assert attributes(spans.named(name))["error.type"] == "WORKER_LOST"
        assert spans.named(name).status.status_code is StatusCode.ERROR
    assert attributes(spans.named(RPC))["error.type"] == "UNAVAILABLE"
    assert measured.grown("millstream_workers_lost_total", role="aggregated") == 1
    assert measured.grown("millstream_worker_stream_open_requests") == 0


async def test_a_request_that_never_starts(text_model: TextModel) -> None:
    spans, measured = SpanLog(), Samples()
    async with traced_suite(text_model, spans) as suite:
        failed = await refusal(suite.stub.Complete(completion("A", options(5, top_p=7.0))))
        assert failed.code is grpc.StatusCode.INVALID_ARGUMENT
        await spans.until_ended(2)
        failed = await refusal(suite.stub.Complete(completion("A", model="guessed")))
        assert failed.reason == "MODEL_NOT_FOUND"
        await spans.until_ended(4)
        await suite.workers[0].host.work.drain(0, 0)
        await until(lambda: not suite.core.models.ready())
        failed = await refusal(suite.stub.Complete(completion("A")))
        assert failed.reason == "NO_WORKER"
        await spans.until_ended(6)
    assert attributes(spans.named(f"text_completion {MODEL}"))["error.type"] == "INVALID_REQUEST"
    unknown = [span for span in spans.ended if span.name == "text_completion"]
    assert [attributes(s)["error.type"] for s in unknown] == ["MODEL_NOT_FOUND", "NO_WORKER"]
    requests = "gen_ai_server_request_duration_seconds_count"
    assert measured.grown(requests, error_type="MODEL_NOT_FOUND", gen_ai_request_model="") == 1
    assert measured.grown(requests, error_type="INVALID_REQUEST", gen_ai_request_model=MODEL) == 1


async def test_a_request_that_the_worker_refuses(text_model: TextModel) -> None:
    spans, measured = SpanLog(), Samples()
    async with traced_suite(text_model, spans, roles=PAIR) as suite:
        other = TicketKey(bytes(range(1, 33)))
        suite.core._parts = replace(suite.core._parts, ticket_key=other)
        failed = await refusal(suite.stub.Complete(completion("A")))
        assert failed.reason == "KV_TRANSFER_FAILED"  # the ticket isn't the client's
        await spans.until_ended(6)
    for name in (f"prefill {MODEL}", f"decode {MODEL}"):
        assert attributes(spans.named(name))["error.type"] == "INVALID_REQUEST"
    legs = [attributes(spans.named(name)).get("error.type") for name in ("prefill", "decode")]
    assert "KV_TRANSFER_FAILED" in legs  # of the leg that was refused first; it ends the other one
    assert measured.grown("millstream_tickets_refused_total") == 2
    # A hand-off's outcome is its prefill leg's, which decode's refusal may have ended before.
    outcomes = ("KV_TRANSFER_FAILED", "CANCELLED")
    grown = [measured.grown("millstream_kv_handoffs_total", outcome=each) for each in outcomes]
    assert sum(grown) == 1


# ---- context


async def test_without_tracing_the_clients_context_is_passed_on_as_it_came(
    text_model: TextModel, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with traced_suite(text_model, None) as suite:
        conversation = Conversation(suite.stub, metadata=INCOMING)
        await conversation.say(start("hi", opts=options(2)))
        await conversation.end()
        (request,) = suite.workers[0].engine.requests
    assert request.trace == TraceContext(TRACEPARENT, "vendor=1", request.trace.baggage)
    assert _logged_traces(caplog) == [TRACE_ID]


async def test_a_turns_log_line_names_its_trace(
    text_model: TextModel, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    spans = SpanLog()
    async with traced_suite(text_model, spans) as suite:
        await chat(suite.stub, "hi", opts=options(2))
        await spans.until_ended(4)
    assert _logged_traces(caplog) == [trace_of(spans.named(RPC))]


def _logged_traces(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the trace ids of the turns that were logged."""
    return [turn["trace_id"] for turn in events(caplog, "turn ended")]


async def test_a_request_that_is_not_sampled_makes_no_span_and_no_further_hop_does() -> None:
    spans = SpanLog(sample_ratio=0.0)
    async with traced_worker(spans.tracing) as one:
        await _decode(one.address, "", ())
        await _decode(one.address, TRACEPARENT, ())
        flags = [int(r.trace.traceparent[-2:], 16) for r in one.engine.requests]
    assert [flag & 1 for flag in flags] == [0, 1]
    assert [trace_of(span) for span in spans.ended] == [TRACE_ID]  # the caller's decision wins


async def test_a_raw_streams_own_context_is_the_parent_of_requests_without_one() -> None:
    spans = SpanLog()
    async with traced_worker(spans.tracing) as one:
        other = TRACEPARENT.replace("b7ad", "beef")
        await _decode(one.address, "", INCOMING)
        await _decode(one.address, other, INCOMING)
        await spans.until_ended(2)
        assert one.engine.requests[0].trace.tracestate == "vendor=1"
    parents = [f"{parent_of(span):016x}" for span in spans.ended]
    assert parents == [SPAN_ID, SPAN_ID.replace("b7ad", "beef")]


async def test_finding_a_worker_is_a_trace_of_its_own_and_its_streams_are_none() -> None:
    spans = SpanLog()
    async with traced_worker(spans.tracing) as one:
        traced = functools.partial(GrpcChannel, tracing=spans.tracing)
        link = WorkerLink(one.address, traced, lambda: None)
        running = asyncio.ensure_future(link.run())
        await until(lambda: link.view.load is not None)  # so both streams are open
        running.cancel()
        await asyncio.wait({running})
    asked, answered = spans.ended[1], spans.ended[0]
    assert [span.name for span in spans.ended] == ["millstream.v1.WorkerService/GetWorkerInfo"] * 2
    assert (asked.kind, answered.kind) == (SpanKind.CLIENT, SpanKind.SERVER)
    assert parent_of(answered) == id_of(asked)
    assert attributes(asked)["server.port"] == int(one.address.rpartition(":")[2])


async def _decode(address: str, traceparent: str, metadata: Sequence[tuple[str, str]]) -> None:
    """Run one request on a worker as a person with a gRPC tool does."""
    request = decode_pb2.DecodeRequest(
        start=generation_pb2.StartGeneration(token_ids=[5], request_id="r")
    )
    request.start.sampling.max_new_tokens = 2
    request.start.trace.traceparent = traceparent
    async with grpc.aio.insecure_channel(address) as channel:
        stub = decode_pb2_grpc.DecodeServiceStub(channel)
        frames = [f async for f in stub.Decode(iter([request]), metadata=metadata)]
    assert frames[-1].frame.finishes


def test_the_trace_of_a_log_line_is_the_spans_or_the_metadatas() -> None:
    spans = SpanLog()
    assert trace_id() == ""
    assert trace_id(INCOMING) == TRACE_ID
    assert trace_id((("user-agent", "x"),)) == ""
    with spans.tracing.tracer.start_as_current_span("now") as span:
        assert trace_id(INCOMING) == f"{span.get_span_context().trace_id:032x}"
    assert incoming(INCOMING) == TraceContext(TRACEPARENT, "vendor=1", "tenant=blue")
    assert incoming(()) is NOT_TRACED


@pytest.mark.parametrize("nonsense", ["x", "00-0-0-01", "00-" + "0" * 32 + f"-{SPAN_ID}-01"])
async def test_a_traceparent_that_is_none_starts_a_trace_of_our_own(
    text_model: TextModel, nonsense: str
) -> None:
    spans = SpanLog()
    async with traced_suite(text_model, spans) as suite:
        conversation = Conversation(suite.stub, metadata=(("traceparent", nonsense),))
        await conversation.say(start("hi", opts=options(2)))
        await conversation.end()
        await spans.until_ended(4)
    assert spans.named(RPC).parent is None
    assert len({trace_of(span) for span in spans.ended}) == 1


# ---- metrics of the same points


async def test_a_turn_is_measured(text_model: TextModel) -> None:
    measured = Samples()
    async with traced_suite(text_model, None, roles=PAIR, config=SLOW) as suite:
        await chat(suite.stub, "hi", opts=options(5))
        prompt = len(suite.workers[0].engine.requests[0].token_ids)
    labels = {
        "gen_ai_operation_name": "chat",
        "gen_ai_provider_name": "simulated",
        "gen_ai_request_model": MODEL,
        "gen_ai_response_model": MODEL,
    }
    for name in ("request_duration", "time_to_first_token", "time_per_output_token"):
        assert measured.grown(f"gen_ai_server_{name}_seconds_count", **labels) == 1, name
    per_token = measured.grown("gen_ai_server_time_per_output_token_seconds_sum")
    assert 0.01 < per_token < 0.5  # a step takes 0.02 s
    tokens = {
        kind: measured.grown("millstream_tokens_total", gen_ai_token_type=kind)
        for kind in ("input", "cached", "output")
    }
    assert tokens == {"input": prompt, "cached": 0, "output": 5}
    assert measured.grown("millstream_kv_handoffs_total", model=MODEL, outcome="ok") == 1
    assert measured.grown("millstream_kv_handoff_duration_seconds_count", model=MODEL) == 1
    # Both ends of each stream live in this process.
    for role in ("prefill", "decode"):
        ended = "millstream_worker_stream_requests_total"
        assert measured.grown(ended, role=role) == 2
    assert measured.grown("millstream_worker_stream_tokens_total", role="decode") == 10
    assert 4 <= measured.grown("millstream_worker_stream_frames_total", role="decode") <= 12
    for gauge in ("millstream_worker_stream_open_requests", "millstream_workers_connected"):
        assert measured.grown(gauge) == 0
    assert measured.grown("millstream_workers_lost_total") == 0  # we left, not they
    for side in ("server", "client"):
        calls = f"rpc_{side}_call_duration_seconds_count"
        await until(lambda calls=calls: measured.grown(calls, rpc_method=_DECODE) == 1)  # type: ignore[misc]


_DECODE = "millstream.v1.DecodeService/Decode"
