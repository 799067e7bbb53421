"""A `Turn` on workers and with a client that the test plays itself."""

from __future__ import annotations

import asyncio
import functools
import gc
import time
import weakref
from dataclasses import replace
from typing import Any, cast

import pytest

from millstream.v1 import generation_pb2
from millstream_server.control.engine import EngineLoad, Role, Task
from millstream_server.generation.output import (
    FinishReason,
    LogprobColumns,
    TokenLogprob,
)
from millstream_server.generation.request import LogprobOptions
from millstream_server.generation.sampling import MAX_SEED, Ability
from millstream_server.generation.ticket import EngineData, KvTransfer
from millstream_server.links.unread import UnreadOutput
from millstream_server.processor import turn as turn_module
from millstream_server.processor.admission import AdmissionQueue, QueueLimits
from millstream_server.processor.choice import Choice
from millstream_server.processor.leg import Leg
from millstream_server.processor.output import Pacer
from millstream_server.processor.telemetry import FrontTelemetry, RequestSpan, TurnTelemetry
from millstream_server.processor.text.tokenizer import TextModel
from millstream_server.processor.turn import Turn
from millstream_server.routing.plan import Plan, PlannedLeg
from millstream_server.routing.workers import RankView, WorkerView
from millstream_server.runtime.errors import (
    InvalidRequestError,
    KvTransferError,
    OverloadedError,
    ServingError,
    WorkerLostError,
)
from millstream_server.runtime.rpc.ledger import Ledger
from millstream_server.runtime.telemetry.trace_context import NOT_TRACED
from millstream_testing.waiting import until
from tests.support.processor.lossy_turn import lossy
from tests.support.processor.played_turn import (
    ALONE,
    DECODE,
    DONE,
    KEY,
    PAIR,
    PREFILL,
    Started,
)
from tests.support.processor.played_turn import make_parts as _parts
from tests.support.processor.played_turn import make_view as _view
from tests.support.processor.played_turn import start_turn as _started


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
    seed = it.turn.seed
    assert seed is not None
    assert seed != other.turn.seed
    drawn = [seed, (seed + 1) % (MAX_SEED + 1)]
    assert _seeds(it) == [drawn, drawn]
    it.turn.start(plan)  # again, on other workers
    assert _seeds(it) == [drawn * 2, drawn * 2]
    asked_for = _started(text_model, plan, n=2, seed=seed)
    assert _seeds(asked_for) == [drawn, drawn], "a client can repeat it"


async def test_no_seed_is_drawn_for_greedy_tokens(text_model: TextModel) -> None:
    it = _started(text_model, _plan(Role.PREFILL, Role.DECODE), temperature=0.0)
    assert it.turn.seed is None
    assert _seeds(it) == [[None], [None]]


@pytest.mark.parametrize("able", [(), (Role.PREFILL,), (Role.DECODE,)])
async def test_no_seed_is_drawn_for_a_worker_that_would_refuse_it(
    text_model: TextModel, able: tuple[Role, ...]
) -> None:
    it = _started(text_model, _plan(*able))
    drawn = it.turn.seed
    assert (drawn is None) == (not able)
    assert _seeds(it) == [[drawn if role in able else None] for role in (Role.PREFILL, Role.DECODE)]


async def test_prompt_logprobs_are_waited_for_even_by_a_stop(text_model: TextModel) -> None:
    ids = text_model.encode("Hello world", add_special_tokens=False)
    it = _started(text_model, PAIR, stops=("world",), logprobs=LogprobOptions(prompt=True))
    asked, turn = it.workers.asked, it.turn
    assert asked["prefill"][0].ticket == asked["decode"][0].ticket is not None
    assert asked["prefill"][0].logprobs == LogprobOptions(prompt=True)
    assert asked["decode"][0].logprobs == LogprobOptions()

    it.workers.sinks["decode"][0].emit(ids)
    await _turns()
    assert not it.client.messages
    logprobs = (TokenLogprob(1, float("nan")), TokenLogprob(2, -0.5))
    it.workers.sinks["prefill"][0].finish(replace(DONE, prompt_logprobs=logprobs))
    await it.client.end()
    assert it.client.texts == ["Hello "]
    assert it.client.messages[0].choices[0].matched_stop.text == "world"
    (_, sent, _) = it.client.messages
    assert [each.token_id for each in sent.prompt_logprobs] == [1, 2]
    assert it.workers.cancels == ["decode"], "the worker may be ahead of the stop"
    turn.close()
    turn.close()
    assert turn.outcome == "STOP"


async def test_an_error_that_comes_with_the_last_stop_comes_too_late(
    text_model: TextModel,
) -> None:
    """The client has read `finished`: an error after that would be a second end."""
    ids = text_model.encode("Hello world", add_special_tokens=False)
    it = _started(text_model, ALONE, stops=("world",))
    it.workers.sinks["decode"][0].emit(ids)
    it.workers.sinks["decode"][0].fail(WorkerLostError("gone"))
    await it.client.end()
    assert it.client.messages[-1].choices[0].matched_stop.text == "world"
    assert it.client.messages[-1].HasField("finished")
    it.turn.fail(WorkerLostError("later still"))
    it.turn.close()
    assert (it.turn.outcome, it.turn.error) == ("STOP", None)


async def test_what_came_before_an_error_is_sent_first(text_model: TextModel) -> None:
    it = _started(text_model, ALONE)
    ids = text_model.encode("Hello", add_special_tokens=False)
    it.workers.sinks["decode"][0].emit(ids)
    it.workers.sinks["decode"][0].fail(WorkerLostError("gone"))
    await it.client.end()
    assert it.client.texts == ["Hello"]
    assert isinstance(it.client.raised, WorkerLostError)
    assert list(it.turn.choices[0].token_ids) == list(ids)


async def test_a_prefill_worker_that_is_lost_after_decodes_first_token(
    text_model: TextModel,
) -> None:
    """The KV cache has come, though prefill's end has not: only prompt logprobs still need it."""
    ids = text_model.encode("Hello", add_special_tokens=False)
    it = _started(text_model, PAIR)
    it.workers.sinks["decode"][0].emit(ids)
    it.workers.sinks["prefill"][0].fail(WorkerLostError("gone"))
    it.workers.sinks["decode"][0].finish(DONE)
    await it.client.end()
    assert (it.client.texts, it.client.raised) == (["Hello"], None)
    assert it.workers.cancels == []
    assert it.admission.left == 1

    it = _started(text_model, PAIR, logprobs=LogprobOptions(prompt=True))
    it.workers.sinks["decode"][0].emit(ids)
    it.workers.sinks["prefill"][0].fail(WorkerLostError("gone"))
    await it.client.end()
    assert isinstance(it.client.raised, WorkerLostError)


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
    await it.client.end()
    sent = [message.choices[0] for message in it.client.messages]
    assert [choice.token_count for choice in sent] == [most, most, 7]
    assert [len(choice.logprobs) for choice in sent] == (
        [0] * 3 if top is None else [most, most, 7]
    )
    assert [message.HasField("finished") for message in it.client.messages] == [False, False, True]
    assert it.turn.usage().completion_tokens == count
    it.turn.close()


@pytest.mark.parametrize("read", [True, False], ids=["read", "abandoned"])
@pytest.mark.parametrize("plan", [ALONE, PAIR], ids=["alone", "pair"])
async def test_it_is_freed_at_its_end_and_not_by_the_garbage_collector(
    text_model: TextModel, plan: Plan, *, read: bool
) -> None:
    it = _started(text_model, plan, n=2)
    sinks = cast("list[Leg]", [s for of_one in it.workers.sinks.values() for s in of_one])
    it.workers.sinks.clear()
    for sink in sinks:  # as a worker's stream does
        sink._running = cast("Any", functools.partial(setattr, sink, "error", None))
    turn, client = it.turn, it.client
    gc.disable()
    try:
        while sinks:
            sinks.pop().finish(DONE)
        if read:
            await client.end()
        turn.close()
        client.output = None
        await _turns()
        alive = weakref.ref(turn), weakref.ref(turn.choices[0].token_ids)
        del it, turn
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
    it.turn.close()
    assert queue.running == 0


async def _turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


# ---- messages


async def test_what_comes_while_a_client_reads_nothing_is_one_message(
    text_model: TextModel,
) -> None:
    it = _started(text_model, ALONE)
    client, sink = it.client, it.workers.sinks["decode"][0]
    for token in (35, 36):
        sink.emit([token])
        await _turns()
    assert client.texts == ["A", "B"]
    client.reads = False
    for token in (37, 38):
        sink.emit([token])
        await _turns()
    assert client.texts == ["A", "B"]
    client.read()
    await _turns()
    assert client.texts == ["A", "B", "CD"]
    client.reads = False
    sink.emit([39])
    await _turns()
    sink.finish(DONE)
    client.read()
    await client.end()
    assert client.texts == ["A", "B", "CD", "E"]
    assert [message.HasField("started") for message in client.messages] == [True] + [False] * 3
    it.turn.close()


async def test_a_shutdown_is_said_in_one_message(text_model: TextModel) -> None:
    due = [False]
    it = _started(text_model, ALONE, notice=lambda: due.pop() if due else False)
    sink = it.workers.sinks["decode"][0]
    for token, notice in ((35, False), (36, True), (37, False)):
        due.append(notice)
        sink.emit([token])
        await _turns()
        due.clear()
    assert it.client.texts == ["A", "B", "C"]
    assert [message.HasField("draining") for message in it.client.messages] == [False, True, False]
    it.turn.close()


async def test_a_stop_that_completes_is_the_last_message(text_model: TextModel) -> None:
    it = _started(text_model, ALONE, stops=("CD",))
    it.workers.sinks["decode"][0].emit([35, 36])
    await _turns()
    it.workers.sinks["decode"][0].emit([37, 38])
    await it.client.end()
    assert it.client.texts == ["AB", ""]
    assert it.client.messages[-1].choices[0].matched_stop.text == "CD"
    it.turn.close()


# ---- when they are sent


async def _paced(text_model: TextModel, interval_s: float = 0.0, own_s: float = 0.0) -> Started:
    """Start a turn that has sent a token."""
    pacer = Pacer(1.0)
    pacer.interval_s = interval_s
    parts = replace(_parts(), pacer=pacer)
    it = _started(text_model, ALONE, parts=parts, min_interval_s=own_s)
    it.workers.sinks["decode"][0].emit([35])
    await _turns()
    assert it.client.texts == ["A"], "the first token waits for nothing"
    return it


async def _next_s(it: Started) -> float:
    """Return how long the next message takes."""
    began, known = time.monotonic(), len(it.client.messages)
    async with asyncio.timeout(5):
        while len(it.client.messages) == known:
            await asyncio.sleep(0)
    return time.monotonic() - began


@pytest.mark.parametrize(("interval_s", "own_s"), [(0.2, 0.0), (0.0, 0.2), (0.05, 0.2)])
async def test_later_tokens_keep_the_longer_interval(
    text_model: TextModel, interval_s: float, own_s: float
) -> None:
    it = await _paced(text_model, interval_s, own_s)
    it.turn.parts.pacer._called_s = asyncio.get_running_loop().time()
    for _ in range(2):
        it.workers.sinks["decode"][0].emit([36])
        it.workers.sinks["decode"][0].emit([37])
        assert 0.15 < await _next_s(it) < 0.5
    assert it.client.texts == ["A", "BC", "BC"]
    assert it.output.longest_interval_s == 0.2
    it.turn.close()


async def test_with_room_no_token_waits(text_model: TextModel) -> None:
    it = await _paced(text_model)
    for _ in range(20):
        it.workers.sinks["decode"][0].emit([36])
        await _turns()
    assert len(it.client.messages) == 21
    assert it.output.longest_interval_s == 0
    it.turn.close()


async def test_a_token_that_comes_after_the_interval_does_not_wait(text_model: TextModel) -> None:
    it = await _paced(text_model, own_s=0.05)
    await asyncio.sleep(0.06)
    it.workers.sinks["decode"][0].emit([36])
    assert await _next_s(it) < 0.04
    assert it.output.longest_interval_s == 0, "nothing was gathered"
    it.turn.close()


async def test_an_end_does_not_wait_for_the_interval(text_model: TextModel) -> None:
    it = await _paced(text_model, own_s=5.0)
    it.workers.sinks["decode"][0].emit([36])
    it.workers.sinks["decode"][0].finish(DONE)
    await it.client.end()
    assert it.client.texts == ["A", "B"]
    it.turn.close()


async def test_a_burst_is_made_of_turns_that_have_sent_nothing(text_model: TextModel) -> None:
    parts = _parts()
    turns = [_started(text_model, ALONE, parts=parts) for _ in range(2)]
    assert parts.pacer.starting == 2
    turns[0].workers.sinks["decode"][0].emit([35])
    await _turns()
    assert parts.pacer.starting == 1
    for it in turns:
        it.turn.close()
        it.turn.close()
    assert parts.pacer.starting == 0


# ---- output that nobody reads


async def test_unread_output_ends_its_request_and_no_other(text_model: TextModel) -> None:
    unread = UnreadOutput(200_000)
    parts = _parts(unread)
    greedy, normal = (
        _started(text_model, ALONE, parts=parts, name=n) for n in ("greedy", "normal")
    )
    greedy.client.reads = False
    entry = TokenLogprob(35, -0.5, tuple((token, -1.0) for token in range(20)))
    sink = greedy.workers.sinks["decode"][0]

    def emit() -> None:
        sink.emit([35], LogprobColumns([entry]))

    emit()
    await _turns()
    for sent in range(800):
        assert not greedy.client.failures, f"after {sent} tokens"
        emit()
    assert 150_000 < unread.used < 200_000, "a token and its logprobs: 40 + 14 + 20 x 9 bytes"
    while not greedy.client.failures:
        emit()
    assert unread.used == 0
    emit()
    normal.workers.sinks["decode"][0].emit([35])
    await _turns()
    assert normal.client.texts == ["A"]
    assert unread.used == 0, "what still comes is dropped"
    assert greedy.workers.cancels == ["decode"]
    with pytest.raises(OverloadedError, match="too much output waits"):
        greedy.output.next()
    assert greedy.turn.choices[0].held_bytes == 0
    for it in (greedy, normal):
        it.turn.close()


async def test_what_was_read_counts_no_more(text_model: TextModel) -> None:
    unread = UnreadOutput()
    it = _started(text_model, ALONE, parts=_parts(unread))
    it.client.reads = False
    for _ in range(3):
        it.workers.sinks["decode"][0].emit([35] * 10)
        await _turns()
    assert unread.used == 1200
    it.client.read()
    await _turns()
    assert unread.used == 0
    it.turn.close()


async def test_of_too_many_running_chats_that_nobody_reads_some_end(text_model: TextModel) -> None:
    """They hold little memory; their tokens take the event loop's time."""
    unread = UnreadOutput()
    unread.late = Ledger(3, unread.late.shed)
    chats = [_started(text_model, ALONE, parts=_parts(unread)) for _ in range(6)]

    async def emit(number: int, tokens: int) -> None:
        for _ in range(tokens):
            chats[number].workers.sinks["decode"][0].emit([35])
            await _turns()

    for number, it in enumerate(chats[:5]):
        it.client.reads = False
        await emit(number, 120)
    assert unread.late.used == 0
    await emit(0, 20)
    await emit(1, 20)
    assert unread.late.used == 2
    chats[0].client.read()
    chats[1].workers.sinks["decode"][0].finish(DONE)
    await _turns()
    assert unread.late.used == 0, "one has read, one runs no more"
    for number in (2, 3, 4, 5):
        chats[number].client.reads = False
        assert not any(it.client.failures for it in chats)
        await emit(number, 140)
    assert [len(it.client.failures) for it in chats] == [0, 0, 1, 0, 0, 0]
    assert unread.late.used == 3
    with pytest.raises(OverloadedError, match="too much output waits"):
        chats[2].output.next()
    for it in chats:
        it.turn.close()
    assert (unread.late.used, unread.used) == (0, 0)


async def test_with_an_interval_output_waits_without_its_client_being_late(
    text_model: TextModel,
) -> None:
    unread = UnreadOutput()
    it = _started(text_model, ALONE, parts=_parts(unread), min_interval_s=10.0)
    sink = it.workers.sinks["decode"][0]
    sink.emit([35])
    await _turns()
    for _ in range(500):
        sink.emit([35])
    await _turns()
    assert unread.used == 500 * 40
    assert unread.late.used == 0
    it.turn.close()


async def test_a_closed_turn_counts_nothing(text_model: TextModel) -> None:
    unread = UnreadOutput()
    it = _started(text_model, ALONE, parts=_parts(unread))
    it.client.reads = False
    sink = it.workers.sinks["decode"][0]
    for _ in range(2):
        sink.emit([35] * 10)
        await _turns()
    assert unread.used == 800
    it.turn.close()
    sink.emit([35] * 10)
    assert unread.used == 0
    assert it.turn.choices[0].held_bytes == 0


# ---- what goes into tickets


async def test_both_legs_get_what_the_prefill_worker_announces(text_model: TextModel) -> None:
    it = _started(text_model, replace(PAIR, transfer=KvTransfer("kind", b"announced")))
    (prefill,), (decode,) = it.workers.asked["prefill"], it.workers.asked["decode"]
    assert prefill.ticket == decode.ticket
    assert decode.ticket
    assert decode.ticket.engine_data == EngineData("kind", b"announced")
    assert KEY.genuine(decode.ticket)


async def test_workers_before_kinds_get_tickets_that_they_know(text_model: TextModel) -> None:
    """As version 0.1.0: no engine data, the first version of the signature."""
    ticket = _started(text_model, PAIR).workers.asked["decode"][0].ticket
    assert ticket
    assert ticket.engine_data is None
    assert KEY.genuine(ticket)


# ---- plans whose legs run one after the other

IN_SEQUENCE = replace(PAIR, transfer=KvTransfer("kind", prefill_first=True))
PREFILLED = replace(DONE, engine_data=EngineData("kind", b"blocks"))


async def test_the_second_leg_of_a_sequence_starts_when_the_first_has_ended(
    text_model: TextModel,
) -> None:
    it = _started(text_model, IN_SEQUENCE)
    assert [len(it.workers.asked[name]) for name in ("prefill", "decode")] == [1, 0]
    first = it.workers.asked["prefill"][0].ticket
    assert first
    assert first.engine_data == EngineData("kind", b"")
    await asyncio.sleep(0.01)
    it.workers.sinks["prefill"][0].finish(PREFILLED)
    (decode,) = it.workers.asked["decode"]
    second = decode.ticket
    assert second
    assert (second.room, second.engine_data) == (first.room, PREFILLED.engine_data)
    assert second.expires_at_ms > first.expires_at_ms
    assert KEY.genuine(first)
    assert KEY.genuine(second)
    it.workers.sinks["decode"][0].finish(DONE)
    await it.client.end()
    assert it.client.messages[-1].choices[0].finish_reason == generation_pb2.FINISH_REASON_LENGTH
    assert it.admission.left == 1


async def test_prefill_may_have_nothing_to_say(text_model: TextModel) -> None:
    it = _started(text_model, IN_SEQUENCE)
    it.workers.sinks["prefill"][0].finish(DONE)
    ticket = it.workers.asked["decode"][0].ticket
    assert ticket
    assert ticket.engine_data == EngineData("kind", b"")


@pytest.mark.parametrize(
    ("said", "error"),
    [
        (EngineData("other", b""), "is of another kind than its own"),
        (EngineData("kind", bytes(65537)), "has 65537 bytes; at most 65536 are allowed"),
    ],
)
async def test_what_prefill_may_not_say_is_never_signed(
    text_model: TextModel, said: EngineData, error: str
) -> None:
    it = _started(text_model, IN_SEQUENCE)
    it.workers.sinks["prefill"][0].finish(replace(DONE, engine_data=said))
    assert it.workers.asked["decode"] == []
    await it.client.end()
    assert isinstance(it.client.raised, KvTransferError)
    assert error in it.client.raised.message


async def test_a_failed_second_leg_ends_a_sequence(text_model: TextModel) -> None:
    it = _started(text_model, IN_SEQUENCE)
    it.workers.sinks["prefill"][0].finish(PREFILLED)
    it.workers.sinks["decode"][0].fail(KvTransferError("lost"))
    await it.client.end()
    assert isinstance(it.client.raised, KvTransferError)
    assert it.admission.left == 1


async def test_a_sequence_cancelled_in_its_second_leg_ends_with_it(text_model: TextModel) -> None:
    it = _started(text_model, IN_SEQUENCE)
    it.workers.sinks["prefill"][0].finish(PREFILLED)
    it.turn.cancel()
    assert it.workers.cancels == ["decode"]
    it.workers.sinks["decode"][0].finish(replace(DONE, reason=FinishReason.CANCELLED))
    await it.client.end()
    assert it.client.messages[-1].choices[0].finish_reason == generation_pb2.FINISH_REASON_CANCELLED
    assert it.admission.left == 1


async def test_a_first_leg_that_ends_before_its_cancel_arrives_starts_no_second(
    text_model: TextModel,
) -> None:
    it = _started(text_model, IN_SEQUENCE)
    it.turn.cancel()
    it.workers.sinks["prefill"][0].finish(PREFILLED)
    assert it.workers.asked["decode"] == []
    await it.client.end()
    last = it.client.messages[-1]
    assert last.choices[0].finish_reason == generation_pb2.FINISH_REASON_CANCELLED
    assert it.admission.left == 1


async def test_a_first_leg_that_ends_after_the_turn_starts_no_second(text_model: TextModel) -> None:
    it = _started(text_model, IN_SEQUENCE)
    it.turn.close()
    it.workers.sinks["prefill"][0].finish(PREFILLED)
    assert it.workers.asked["decode"] == []


async def test_a_failed_first_leg_starts_no_second(text_model: TextModel) -> None:
    it = _started(text_model, IN_SEQUENCE)
    it.workers.sinks["prefill"][0].fail(WorkerLostError("gone"))
    assert it.workers.asked["decode"] == []
    await it.client.end()
    assert isinstance(it.client.raised, WorkerLostError)


async def test_a_sequence_cancelled_in_its_first_leg_ends_with_it(text_model: TextModel) -> None:
    it = _started(text_model, IN_SEQUENCE)
    it.turn.cancel()
    assert it.workers.cancels == ["prefill"]
    it.workers.sinks["prefill"][0].finish(replace(DONE, reason=FinishReason.CANCELLED))
    assert it.workers.asked["decode"] == []
    await it.client.end()
    assert it.client.messages[-1].choices[0].finish_reason == generation_pb2.FINISH_REASON_CANCELLED


# ---- telemetry that breaks


class _BrokenSpan(RequestSpan):
    def ended(self, *, cancelled: bool = False) -> None:
        raise RuntimeError

    def failed(self, error: BaseException) -> None:
        raise RuntimeError


class _BrokenTelemetry(TurnTelemetry):
    def leg(self, role: Role, address: str) -> RequestSpan:
        return _BrokenSpan()

    def ended(self, *_: Any) -> None:
        raise RuntimeError


def _broken() -> _BrokenTelemetry:
    return _BrokenTelemetry(FrontTelemetry(), Task.CHAT, NOT_TRACED, 1)


async def test_closing_gives_back_the_admission_and_the_worker_whatever_telemetry_does(
    text_model: TextModel,
) -> None:
    it = _started(
        text_model,
        ALONE,
        n=2,
        telemetry=_broken(),
    )
    with pytest.raises(RuntimeError):
        it.turn.close()
    assert it.admission.left == 1
    assert it.workers.cancels == ["decode", "decode"]


@pytest.mark.parametrize("error", [None, WorkerLostError("gone")])
async def test_a_legs_end_counts_whatever_telemetry_does(
    text_model: TextModel, error: ServingError | None
) -> None:
    it = _started(
        text_model,
        PAIR,
        telemetry=_broken(),
        logprobs=LogprobOptions(prompt=True),
    )
    for sink in (*it.workers.sinks["decode"], *it.workers.sinks["prefill"]):
        with pytest.raises(RuntimeError):
            sink.fail(error) if error else sink.finish(DONE)
    assert it.admission.left == 1
    if error:
        await it.client.end()
        assert isinstance(it.client.raised, WorkerLostError)
    else:
        await it.client.end()
        assert (
            it.client.messages[-1].choices[0].finish_reason == generation_pb2.FINISH_REASON_LENGTH
        )


# ---- plans whose KV cache comes after the end of the prompt's leg


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Look soon for the KV cache; return for which choices it is waited, each time anew."""
    waits: list[int] = []
    wait = Turn._await_cache

    def counted(turn: Turn, choice: Choice, prompt: Leg) -> None:
        waits.append(choice.index)
        wait(turn, choice, prompt)

    monkeypatch.setattr(turn_module, "TRANSFER_S", 0.01)
    monkeypatch.setattr(Turn, "_await_cache", counted)
    return waits


def _written_to(text_model: TextModel, load: EngineLoad | None) -> tuple[Started, WorkerView]:
    """Start a turn whose prefill ends; decode has reported ``load``."""
    decode = _view("decode", Role.DECODE)
    decode.load = load
    legs = (PAIR.legs[0], PlannedLeg(Role.DECODE, decode))
    it = _started(text_model, Plan(legs, transfer=KvTransfer("kind", b"where")))
    it.workers.sinks["prefill"][0].finish(DONE)
    return it, decode


IDLE = EngineLoad(running_requests=0, used_blocks=0, total_blocks=500)
FULL = [replace(IDLE, running_requests=9), replace(IDLE, used_blocks=499)]


@pytest.mark.usefixtures("looks")
async def test_a_kv_cache_that_does_not_come_fails_the_hand_off(text_model: TextModel) -> None:
    it, _ = _written_to(text_model, IDLE)
    await it.client.end()
    assert isinstance(it.client.raised, KvTransferError)
    assert it.workers.cancels == ["decode"]
    assert it.admission.left


@pytest.mark.parametrize("load", [*FULL, None], ids=["requests", "blocks", "silent"])
async def test_a_decode_worker_that_may_be_full_is_waited_for(
    text_model: TextModel, looks: list[int], load: EngineLoad | None
) -> None:
    it, decode = _written_to(text_model, load)
    await until(lambda: len(looks) > 1)
    assert it.turn.error is None
    decode.load = IDLE
    await it.client.end()
    assert isinstance(it.client.raised, KvTransferError)


async def test_what_has_come_in_time_goes_on(text_model: TextModel, looks: list[int]) -> None:
    it, _ = _written_to(text_model, IDLE)
    it.workers.sinks["decode"][0].emit([40])
    moved = lossy(text_model, replace(PAIR, transfer=KvTransfer("kind", b"where")))
    moved.it.workers.sinks["prefill"][0].finish(DONE)
    moved.lose([], KvTransferError("broken"))  # its next hand-off has a time of its own
    at_once = _started(text_model, PAIR)  # its leg ends with the transfer
    at_once.workers.sinks["prefill"][0].finish(DONE)
    assert looks == [0, 0]
    timers = [timer for each in (it, moved.it) for timer in each.turn._timers]
    await until(lambda: all(timer.when() < asyncio.get_running_loop().time() for timer in timers))
    await asyncio.sleep(0)
    assert [each.turn.error for each in (it, moved.it, at_once)] == [None] * 3


async def test_a_turn_that_is_over_is_not_kept_until_then(text_model: TextModel) -> None:
    it, _ = _written_to(text_model, IDLE)
    (timer,) = it.turn._timers
    it.turn.close()
    assert timer.cancelled()
