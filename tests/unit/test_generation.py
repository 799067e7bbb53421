"""A `Generation` on workers that the test plays itself."""

from __future__ import annotations

import asyncio
import functools
import gc
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import pytest

from millstream_server.engines.base import Role, WorkerDescription
from millstream_server.generation.generator import GeneratorInfo
from millstream_server.generation.logprobs import LogprobColumns
from millstream_server.generation.output import Finish, FinishReason, OutputSink, TokenLogprob
from millstream_server.generation.request import GenerationRequest, LogprobOptions, Prompt
from millstream_server.generation.sampling import MAX_SEED, Ability, Sampling
from millstream_server.generation.span import RequestSpan
from millstream_server.links.unread import UnreadOutput
from millstream_server.processor import legs
from millstream_server.processor.choice import Delta
from millstream_server.processor.generation import Generation
from millstream_server.processor.launch import GenerationParts
from millstream_server.processor.options import Options
from millstream_server.processor.pacing import Pacer
from millstream_server.processor.queue.admission import Admission
from millstream_server.processor.queue.admission_queue import AdmissionQueue, QueueLimits
from millstream_server.processor.telemetry import NO_TELEMETRY, TurnTelemetry
from millstream_server.processor.text.tokenizer import TextModel
from millstream_server.routing.plan import Plan, PlannedLeg
from millstream_server.routing.workers import RankView, WorkerView
from millstream_server.runtime.errors import (
    InvalidRequestError,
    OverloadedError,
    ServingError,
    WorkerLostError,
)
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


def _view(address: str, role: Role, *abilities: Ability) -> WorkerView:
    engine = GeneratorInfo(
        engine="simulated",
        engine_version="1",
        max_running_requests=9,
        vocab_size=500,
        context_length=500,
        block_size=1,
        total_blocks=500,
        abilities=frozenset(abilities),
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


def _parts(unread: UnreadOutput | None = None) -> GenerationParts:
    return GenerationParts(
        pacer=Pacer(0.05),
        workers=Played(),
        ticket_key=TicketKey(bytes(32)),
        unread=unread or UnreadOutput(),
    )


def _started(
    text_model: TextModel,
    plan: Plan,
    *,
    telemetry: TurnTelemetry = NO_TELEMETRY,
    logprobs: LogprobOptions | None = None,
    admission: Admission | None = None,
    parts: GenerationParts | None = None,
    seed: int | None = None,
    temperature: float = 1.0,
    **options: Any,
) -> Started:
    workers, admitted = Played(), Admitted()
    request = GenerationRequest(
        request_id="r",
        model="m",
        prompt=Prompt([1, 2]),
        sampling=Sampling(max_new_tokens=9, seed=seed, temperature=temperature),
        logprobs=logprobs,
    )
    generation = Generation(
        request,
        Options(path="options.", sampling={}, **options),
        text_model,
        admission or cast("Any", admitted),
        replace(parts or _parts(), workers=workers),
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


def _plan(*able: Role) -> Plan:
    """Plan a hand-off whose workers of these roles take seeds."""
    return Plan(
        tuple(
            PlannedLeg(role, _view(role.value, role, *[Ability.SEED] * (role in able)))
            for role in (Role.PREFILL, Role.DECODE)
        )
    )


def _seeds(it: Started) -> list[list[int | None]]:
    """Return the seeds that each worker was sent."""
    return [[request.sampling.seed for request in asked] for asked in it.workers.asked.values()]


async def test_a_seed_is_drawn_once_and_goes_wherever_its_choice_runs(
    text_model: TextModel,
) -> None:
    """An engine that takes seeds draws the same tokens for all requests without one."""
    plan = _plan(Role.PREFILL, Role.DECODE)
    it, other = (_started(text_model, plan, n=2) for _ in range(2))
    seed = it.generation.seed
    assert seed is not None
    assert seed != other.generation.seed
    drawn = [seed, (seed + 1) % (MAX_SEED + 1)]
    assert _seeds(it) == [drawn, drawn]
    it.generation.start(plan)  # again, on other workers
    assert _seeds(it) == [drawn * 2, drawn * 2]
    asked_for = _started(text_model, plan, n=2, seed=seed)
    assert _seeds(asked_for) == [drawn, drawn], "a client can repeat it"


async def test_no_seed_is_drawn_for_greedy_tokens(text_model: TextModel) -> None:
    it = _started(text_model, _plan(Role.PREFILL, Role.DECODE), temperature=0.0)
    assert it.generation.seed is None
    assert _seeds(it) == [[None], [None]]


@pytest.mark.parametrize("able", [(), (Role.PREFILL,), (Role.DECODE,)])
async def test_no_seed_is_drawn_for_a_worker_that_would_refuse_it(
    text_model: TextModel, able: tuple[Role, ...]
) -> None:
    it = _started(text_model, _plan(*able))
    drawn = it.generation.seed
    assert (drawn is None) == (not able)
    assert _seeds(it) == [[drawn if role in able else None] for role in (Role.PREFILL, Role.DECODE)]


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


def _outlet(generation: Generation) -> Callable[[Sequence[Delta]], bool]:
    """Make one that knows its generation, as those of clients do."""
    return lambda _: not generation.complete


@pytest.mark.parametrize("read", [True, False], ids=["read", "abandoned"])
@pytest.mark.parametrize("plan", [ALONE, PAIR], ids=["alone", "pair"])
async def test_it_is_freed_at_its_end_and_not_by_the_garbage_collector(
    text_model: TextModel, plan: Plan, *, read: bool
) -> None:
    it = _started(text_model, plan, n=2)
    sinks = cast("list[legs.Leg]", [s for of_one in it.workers.sinks.values() for s in of_one])
    it.workers.sinks.clear()
    for sink in sinks:  # as a worker's stream does
        sink._cancel = functools.partial(setattr, sink, "error", None)
    generation = it.generation
    generation.send_through(_outlet(generation), "payer", lambda _: None)
    gc.disable()
    try:
        while sinks:
            sinks.pop().finish(DONE)
        while read and not generation.complete:
            await asyncio.wait_for(generation.deltas(), 5)
        generation.close()
        alive = weakref.ref(generation), weakref.ref(generation.delivery)
        del it, generation
        assert [ref() for ref in alive] == [None, None]
    finally:
        gc.enable()


async def test_a_client_that_does_not_read_holds_no_capacity(text_model: TextModel) -> None:
    """Else a few of them would keep everybody else out of engines that have nothing to do."""
    queue = AdmissionQueue("unit", QueueLimits(), lambda: 2)
    it = _started(text_model, ALONE, n=2, admission=queue.enter(2))
    sinks = it.workers.sinks["decode"]
    sinks[0].finish(DONE)
    assert queue.running == 2
    sinks[1].fail(InvalidRequestError("no"))
    assert queue.running == 0
    it.generation.close()
    assert queue.running == 0


# ---- output that is sent without the request's task


class Client:
    """A generation's outlet; reads while ``reads``."""

    def __init__(self, it: Started, payer: str = "client") -> None:
        self.reads = True
        self.texts: list[str] = []
        self.ended: list[ServingError] = []
        self._generation = it.generation
        it.generation.send_through(self._send, payer, self.ended.append)
        self.task = asyncio.ensure_future(it.generation.deltas())

    def _send(self, deltas: Sequence[Delta]) -> bool:
        if self.reads:
            self.texts += [delta.text for delta in deltas]
        return self.reads

    async def rest(self) -> list[Delta]:
        """What the task gets now; it then asks for more."""
        deltas = await asyncio.wait_for(self.task, 5)
        self.task = asyncio.ensure_future(self._generation.deltas())
        return deltas


async def _turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_only_what_a_client_does_not_take_and_the_end_wake_the_task(
    text_model: TextModel,
) -> None:
    it = _started(text_model, ALONE)
    client, sink = Client(it), it.workers.sinks["decode"][0]
    for token in (35, 36):
        await _turns()
        sink.emit([token])
    await _turns()
    assert client.texts == ["A", "B"]
    assert not client.task.done()
    client.reads = False
    sink.emit([37])
    await _turns()
    sink.emit([38])
    assert [delta.text for delta in await client.rest()] == ["C"]
    assert [delta.text for delta in await client.rest()] == ["D"]
    client.reads = True
    await _turns()
    sink.emit([39])
    sink.finish(DONE)
    (last,) = await asyncio.wait_for(client.task, 5)
    assert (last.text, last.finish_reason) == ("E", DONE.reason)
    assert client.texts == ["A", "B"]
    it.generation.close()


async def test_an_end_that_comes_while_the_client_takes_nothing_is_not_missed(
    text_model: TextModel,
) -> None:
    it = _started(text_model, ALONE)
    client, sink = Client(it), it.workers.sinks["decode"][0]
    await _turns()
    client.reads = False
    sink.emit([35])
    await asyncio.sleep(0)  # it is offered, and refused
    sink.finish(DONE)
    assert [delta.text for delta in await client.rest()] == ["A"]
    (last,) = await asyncio.wait_for(client.task, 5)
    assert last.finish_reason is DONE.reason
    it.generation.close()


async def test_a_stop_that_completes_goes_through_the_task(text_model: TextModel) -> None:
    it = _started(text_model, ALONE, stops=("CD",))
    client = Client(it)
    await _turns()
    it.workers.sinks["decode"][0].emit([35, 36])
    await _turns()
    it.workers.sinks["decode"][0].emit([37, 38])
    (last,) = await asyncio.wait_for(client.task, 5)
    assert (client.texts, last.text, last.matched_stop) == (["AB"], "", "CD")
    it.generation.close()


async def test_what_fails_when_it_is_sent_fails_that_request_alone(text_model: TextModel) -> None:
    parts = _parts()
    broken, sound = (_started(text_model, ALONE, parts=parts) for _ in range(2))
    clients = Client(broken), Client(sound)
    clients[0].texts = cast("Any", None)
    for _ in range(2):
        await _turns()
        for it in (broken, sound):
            it.workers.sinks["decode"][0].emit([35])
    await _turns()
    with pytest.raises(TypeError):
        await asyncio.wait_for(clients[0].task, 5)
    assert clients[1].texts == ["A", "A"]
    assert not clients[1].task.done()
    clients[1].task.cancel()
    for it in (broken, sound):
        it.generation.close()


# ---- output that nobody reads


async def test_unread_output_ends_its_request_and_no_other(text_model: TextModel) -> None:
    unread = UnreadOutput(200_000)
    parts = _parts(unread)
    greedy, sound = (_started(text_model, ALONE, parts=parts) for _ in range(2))
    clients = Client(greedy, "greedy"), Client(sound, "sound")
    await _turns()
    clients[0].reads = False
    entry = TokenLogprob(35, -0.5, tuple((token, -1.0) for token in range(20)))
    sink = greedy.workers.sinks["decode"][0]

    def emit() -> None:
        sink.emit([35], LogprobColumns([entry]))

    emit()
    await asyncio.wait_for(clients[0].task, 5)  # and is not asked again: the client reads nothing
    for sent in range(800):
        assert not clients[0].ended, f"after {sent} tokens"
        emit()
    assert 150_000 < unread.used < 200_000, "a token and its logprobs: 40 + 14 + 20 x 9 bytes"
    while not clients[0].ended:
        emit()
    assert unread.used == 0
    emit()
    sound.workers.sinks["decode"][0].emit([35])
    await _turns()
    assert clients[1].texts == ["A"]
    assert unread.used == 0, "what still comes is dropped"
    assert greedy.workers.cancels == ["decode"]
    with pytest.raises(OverloadedError, match="too much output waits"):
        await asyncio.wait_for(greedy.generation.deltas(), 5)
    assert greedy.generation._choices[0].held_bytes == 0
    clients[1].task.cancel()
    for it in (greedy, sound):
        it.generation.close()


async def test_a_closed_generation_counts_nothing(text_model: TextModel) -> None:
    unread = UnreadOutput()
    it = _started(text_model, ALONE, parts=_parts(unread))
    sink = it.workers.sinks["decode"][0]
    sink.emit([35] * 10)
    assert unread.used == 400
    it.generation.close()
    sink.emit([35] * 10)
    assert unread.used == 0


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
