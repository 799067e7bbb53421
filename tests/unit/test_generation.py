"""A `Generation` on workers that the test plays itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import pytest

from millstream_server.engines.base import Role, WorkerDescription
from millstream_server.generation.generator import GeneratorInfo
from millstream_server.generation.output import Finish, FinishReason, OutputSink, TokenLogprob
from millstream_server.generation.request import GenerationRequest, LogprobOptions, Prompt
from millstream_server.generation.sampling import Sampling
from millstream_server.generation.span import RequestSpan
from millstream_server.processor import legs
from millstream_server.processor.generation import Generation
from millstream_server.processor.launch import GenerationParts
from millstream_server.processor.options import Options
from millstream_server.processor.pacing import Pacer
from millstream_server.processor.queue.admission import Admission, AdmissionRequest
from millstream_server.processor.queue.admission_queue import AdmissionQueue, QueueLimits
from millstream_server.processor.telemetry import NO_TELEMETRY, TurnTelemetry
from millstream_server.processor.text.tokenizer import TextModel
from millstream_server.routing.plan import Plan, PlannedLeg
from millstream_server.routing.workers import RankView, WorkerView
from millstream_server.runtime.errors import InvalidRequestError, ServingError, WorkerLostError
from millstream_server.transfer.ticket import TicketKey


class Played(legs.Workers):
    """Stands where a `Fleet` would; keeps what its workers were asked and where output goes."""

    def __init__(self) -> None:
        self.asked: dict[str, list[GenerationRequest]] = {"prefill": [], "decode": []}
        self.sinks: dict[str, list[OutputSink]] = {"prefill": [], "decode": []}
        self.cancels: list[str] = []

    def generate(
        self, address: str, request: GenerationRequest, sink: OutputSink
    ) -> Callable[[], None]:
        self.asked[address].append(request)
        self.sinks[address].append(sink)
        return lambda: self.cancels.append(address)


def _view(address: str, role: Role) -> WorkerView:
    engine = GeneratorInfo(
        engine="simulated",
        engine_version="1",
        max_running_requests=9,
        vocab_size=500,
        context_length=500,
        block_size=1,
        total_blocks=500,
        bootstrap_host="127.0.0.1",
        bootstrap_port=1,
    )
    return WorkerView(address, WorkerDescription(role=role, model="m", engine=engine))


PREFILL, DECODE = _view("prefill", Role.PREFILL), _view("decode", Role.DECODE)
ALONE = Plan((PlannedLeg(Role.AGGREGATED, DECODE),))
PAIR = Plan((PlannedLeg(Role.PREFILL, PREFILL), PlannedLeg(Role.DECODE, DECODE)))


DONE = Finish(reason=FinishReason.LENGTH, prompt_tokens=2, completion_tokens=1)


class Admitted:
    """Stands where an `Admission` would."""

    def __init__(self) -> None:
        self.left = 0

    def leave(self) -> None:
        self.left += 1


@dataclass
class Started:
    """A generation on played workers."""

    generation: Generation
    workers: Played
    admission: Admitted


def _started(
    text_model: TextModel,
    plan: Plan,
    *,
    telemetry: TurnTelemetry = NO_TELEMETRY,
    logprobs: LogprobOptions | None = None,
    admission: Admission | None = None,
    **options: Any,
) -> Started:
    workers, admitted = Played(), Admitted()
    request = GenerationRequest(
        request_id="r",
        model="m",
        prompt=Prompt([1, 2]),
        sampling=Sampling(max_new_tokens=9),
        logprobs=logprobs,
    )
    generation = Generation(
        request,
        Options(path="options.", sampling={}, **options),
        text_model,
        admission or cast("Any", admitted),
        GenerationParts(pacer=Pacer(0.05), workers=workers, ticket_key=TicketKey(bytes(32))),
        telemetry=telemetry,
    )
    generation.start(plan)
    return Started(generation, workers, admitted)


async def test_each_leg_names_its_rank_and_the_ticket_that_of_the_prefill(
    text_model: TextModel,
) -> None:
    legs = [
        PlannedLeg(role, RankView(view.address, worker=view, number=rank, dp_rank=rank), cached)
        for role, view, rank, cached in (
            (Role.PREFILL, PREFILL, 1, 32),
            (Role.DECODE, DECODE, 0, 0),
        )
    ]
    asked = _started(text_model, Plan(tuple(legs))).workers.asked
    prefill, decode = asked["prefill"][0], asked["decode"][0]
    assert (prefill.dp_rank, prefill.expected_cached_tokens) == (1, 32)
    assert (decode.dp_rank, decode.expected_cached_tokens) == (0, 0)
    assert prefill.ticket == decode.ticket
    assert prefill.ticket
    assert prefill.ticket.prefill_dp_rank == 1


async def test_prompt_logprobs_are_waited_for_even_by_a_stop(text_model: TextModel) -> None:
    ids = text_model.encode("Hello world", add_special_tokens=False)
    it = _started(text_model, PAIR, stops=("world",), logprobs=LogprobOptions(prompt=True))
    asked, generation = it.workers.asked, it.generation
    assert asked["prefill"][0].ticket == asked["decode"][0].ticket is not None
    assert asked["prefill"][0].logprobs == LogprobOptions(prompt=True)
    assert asked["decode"][0].logprobs == LogprobOptions()

    first = asyncio.ensure_future(generation.deltas())
    it.workers.sinks["decode"][0].emit(ids)
    for _ in range(5):
        await asyncio.sleep(0)
    assert not first.done()
    logprobs = (TokenLogprob(1, float("nan")), TokenLogprob(2, -0.5))
    it.workers.sinks["prefill"][0].finish(replace(DONE, prompt_logprobs=logprobs))
    (delta,) = await asyncio.wait_for(first, 5)
    assert delta.matched_stop == "world"
    assert "world" not in delta.text
    assert generation.prompt_logprobs() == logprobs
    assert it.workers.cancels == ["decode"], "the worker may be ahead of the stop"
    generation.close()
    generation.close()
    assert generation.outcome == "STOP"


async def test_an_error_that_comes_with_the_last_stop_comes_too_late(
    text_model: TextModel,
) -> None:
    """The client has read `finished`: an error after that would be a second end."""
    ids = text_model.encode("Hello world", add_special_tokens=False)
    it = _started(text_model, ALONE, stops=("world",))
    it.workers.sinks["decode"][0].emit(ids)
    it.workers.sinks["decode"][0].fail(WorkerLostError("gone"))
    given = []
    while not it.generation.complete:
        given += await asyncio.wait_for(it.generation.deltas(), 5)
    assert given[-1].matched_stop == "world"
    it.generation.fail(WorkerLostError("later still"))
    it.generation.close()
    assert (it.generation.outcome, it.generation.error) == ("STOP", None)


async def test_what_came_before_an_error_is_given_out_first(text_model: TextModel) -> None:
    it = _started(text_model, ALONE)
    it.workers.sinks["decode"][0].emit(text_model.encode("Hello", add_special_tokens=False))
    it.workers.sinks["decode"][0].fail(WorkerLostError("gone"))
    (delta,) = await asyncio.wait_for(it.generation.deltas(), 5)
    assert delta.text == "Hello"
    with pytest.raises(WorkerLostError):
        await asyncio.wait_for(it.generation.deltas(), 5)
    assert list(it.generation._choices[0].token_ids) == list(delta.token_ids)


@pytest.mark.parametrize(
    ("top", "most"),
    [(None, 16_384), (0, 256), (20, 256)],
    ids=["ids", "logprobs", "and top 20"],
)
async def test_a_backlog_comes_in_messages_that_a_client_takes(
    text_model: TextModel, top: int | None, most: int
) -> None:
    """And in turns with the other streams: each is worth some milliseconds."""
    count = 2 * most + 7
    it = _started(text_model, ALONE)
    alternatives = tuple((token, -1.0) for token in range(top or 0))
    logprobs = [TokenLogprob(65, -0.5, alternatives)] * (0 if top is None else count)
    it.workers.sinks["decode"][0].emit([65] * count, logprobs)
    it.workers.sinks["decode"][0].finish(replace(DONE, completion_tokens=count))
    given = []
    while not it.generation.complete:
        given += await asyncio.wait_for(it.generation.deltas(), 5)
    assert [len(delta.token_ids) for delta in given] == [most, most, 7]
    assert [len(delta.logprobs) for delta in given] == ([0] * 3 if top is None else [most, most, 7])
    assert [delta.finish_reason for delta in given] == [None, None, DONE.reason]
    assert it.generation.usage().completion_tokens == count
    it.generation.close()


async def test_a_client_that_does_not_read_holds_no_capacity(text_model: TextModel) -> None:
    """Else a few of them would keep everybody else out of engines that have nothing to do."""
    queue = AdmissionQueue("unit", QueueLimits(), lambda: 2)
    it = _started(text_model, ALONE, n=2, admission=queue.enter(AdmissionRequest(units=2)))
    sinks = it.workers.sinks["decode"]
    sinks[0].finish(DONE)
    assert queue.running == 2
    sinks[1].fail(InvalidRequestError("no"))
    assert queue.running == 0
    it.generation.close()
    assert queue.running == 0


# ---- plans whose legs run one after the other


async def test_the_second_leg_of_a_sequence_starts_when_the_first_has_ended(
    text_model: TextModel,
) -> None:
    it = _started(text_model, replace(PAIR, concurrent=False))
    assert [len(it.workers.asked[name]) for name in ("prefill", "decode")] == [1, 0]
    it.workers.sinks["prefill"][0].finish(DONE)
    (decode,) = it.workers.asked["decode"]
    assert decode.ticket == it.workers.asked["prefill"][0].ticket
    it.workers.sinks["decode"][0].finish(DONE)
    (delta,) = await asyncio.wait_for(it.generation.deltas(), 5)
    assert delta.finish_reason is FinishReason.LENGTH
    assert it.admission.left == 1


async def test_a_failed_first_leg_starts_no_second(text_model: TextModel) -> None:
    it = _started(text_model, replace(PAIR, concurrent=False))
    it.workers.sinks["prefill"][0].fail(WorkerLostError("gone"))
    assert it.workers.asked["decode"] == []
    with pytest.raises(WorkerLostError):
        await asyncio.wait_for(it.generation.deltas(), 5)


async def test_a_sequence_cancelled_in_its_first_leg_ends_with_it(text_model: TextModel) -> None:
    it = _started(text_model, replace(PAIR, concurrent=False))
    it.generation.cancel()
    assert it.workers.cancels == ["prefill"]
    it.workers.sinks["prefill"][0].finish(replace(DONE, reason=FinishReason.CANCELLED))
    assert it.workers.asked["decode"] == []
    (delta,) = await asyncio.wait_for(it.generation.deltas(), 5)
    assert delta.finish_reason is FinishReason.CANCELLED


# ---- telemetry that breaks


class _BrokenSpan(RequestSpan):
    def finished(self, finish: Finish) -> None:
        raise RuntimeError

    def failed(self, error: BaseException) -> None:
        raise RuntimeError


class _BrokenTelemetry(TurnTelemetry):
    def leg(self, role: Role, address: str) -> RequestSpan:
        return _BrokenSpan()

    def ended(self, *_: Any) -> None:
        raise RuntimeError


async def test_closing_gives_back_the_admission_and_the_worker_whatever_telemetry_does(
    text_model: TextModel,
) -> None:
    it = _started(text_model, ALONE, n=2, telemetry=_BrokenTelemetry())
    with pytest.raises(RuntimeError):
        it.generation.close()
    assert it.admission.left == 1
    assert it.workers.cancels == ["decode", "decode"]


@pytest.mark.parametrize("error", [None, WorkerLostError("gone")])
async def test_a_legs_end_counts_whatever_telemetry_does(
    text_model: TextModel, error: ServingError | None
) -> None:
    it = _started(
        text_model, PAIR, telemetry=_BrokenTelemetry(), logprobs=LogprobOptions(prompt=True)
    )
    for sink in (*it.workers.sinks["decode"], *it.workers.sinks["prefill"]):
        with pytest.raises(RuntimeError):
            sink.fail(error) if error else sink.finish(DONE)
    assert it.admission.left == 1
    if error:
        with pytest.raises(WorkerLostError):
            await asyncio.wait_for(it.generation.deltas(), 5)
    else:
        (delta,) = await asyncio.wait_for(it.generation.deltas(), 5)
        assert delta.finish_reason is FinishReason.LENGTH
