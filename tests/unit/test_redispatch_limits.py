"""When a choice that has lost its worker does not go on, or not at once."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from typing import Any

import pytest

from millstream_server.control.engine import Role
from millstream_server.diffusion.request import DiffusionRequest, Kind
from millstream_server.embedding.request import EmbedRequest
from millstream_server.generation.output import FinishReason
from millstream_server.generation.request import GenerationRequest, Prompt
from millstream_server.generation.sampling import Sampling
from millstream_server.generation.ticket import KvTransfer
from millstream_server.processor import redispatch
from millstream_server.processor.losses import RepeatedLosses
from millstream_server.processor.redispatch_ways import Way
from millstream_server.processor.text.tokenizer import TextModel
from millstream_server.routing.plan import Plan, PlannedLeg, RoutingRequest
from millstream_server.runtime.errors import (
    EngineFailedError,
    InvalidRequestError,
    KvTransferError,
    NoWorkerError,
    OverloadedError,
    RepeatedLossError,
    ServingError,
    WorkerDrainingError,
    WorkerLostError,
    WorkerPausedError,
)
from millstream_testing.waiting import until
from tests.support.processor.lossy_turn import GONE, OTHER, THIRD, lossy, on
from tests.support.processor.played_turn import DONE, PAIR, PREFILL, make_view
from tests.support.telemetry.spans import Samples

# ---- not


@pytest.mark.parametrize(
    "error",
    [WorkerPausedError("paused"), OverloadedError("full"), InvalidRequestError.of("x", "wrong")],
)
async def test_a_worker_that_is_not_lost_keeps_its_request(
    text_model: TextModel, error: ServingError
) -> None:
    it = lossy(text_model)
    it.lose([40], error)
    await it.it.client.end()
    assert (it.it.client.raised, it.routes.asked) == (error, [])


async def test_without_another_worker_the_loss_is_told(text_model: TextModel) -> None:
    it = lossy(text_model, plans=[])
    it.lose([40])
    await it.it.client.end()
    assert it.it.client.raised is GONE
    assert it.ids == [40]
    assert it.it.admission.left


async def test_what_the_other_worker_refuses_as_wrong_is_told_as_the_loss(
    text_model: TextModel,
) -> None:
    it = lossy(text_model)
    it.lose([40])
    it.sink().fail(InvalidRequestError.of("prompt", "too long by a token"))
    await it.it.client.end()
    assert it.it.client.raised is GONE


@pytest.mark.parametrize("error", [GONE, EngineFailedError("dead")])
async def test_a_request_that_loses_two_workers_goes_to_no_third(
    text_model: TextModel, error: ServingError
) -> None:
    it = lossy(text_model)
    it.lose([40], error)
    it.sink().emit([41])
    it.sink().fail(error)
    await it.it.client.end()
    assert isinstance(it.it.client.raised, RepeatedLossError)
    assert not it.it.client.raised.retryable
    assert "third" not in it.it.workers.asked
    assert it.ids == [40, 41]


async def test_hand_offs_that_fail_again_end_it_and_accuse_it_of_nothing(
    text_model: TextModel,
) -> None:
    """It may be sent again: no worker has died."""
    it, broken = lossy(text_model), KvTransferError("broken")
    it.lose([40], broken)
    it.sink().fail(broken)
    await it.it.client.end()
    assert it.it.client.raised is broken
    assert "third" not in it.it.workers.asked


async def test_a_ticket_that_a_worker_refuses_is_not_the_clients_fault(
    text_model: TextModel,
) -> None:
    """A machine whose clock is wrong: the request goes on at others, or may be sent again."""
    it, expired = lossy(text_model, PAIR), InvalidRequestError.of("ticket.expires_at", "has passed")
    it.lose([], expired)
    assert len(it.routes.asked) == 1
    it.sink().fail(expired)
    await it.it.client.end()
    assert isinstance(it.it.client.raised, KvTransferError)
    assert it.it.client.raised.retryable


async def test_a_hand_off_that_failed_avoids_either_end(text_model: TextModel) -> None:
    """With one prefill worker only, the way to another decode worker may be open."""
    it = lossy(text_model, PAIR)
    spared = it.routes.plan

    def plan(request: RoutingRequest) -> Plan:
        if PREFILL.address in request.avoid:
            it.routes.asked.append(request)
            raise NoWorkerError("no other prefill worker")
        return spared(request)

    it.it.turn.parts.redispatch._plan = plan  # type: ignore[union-attr]
    it.lose([], KvTransferError("broken"))
    it.sink().emit([40])
    asked = [each.avoid for each in it.routes.asked]
    assert asked == [(PREFILL.address, "decode"), (PREFILL.address,), ("decode",)]
    assert it.ids == [40]


async def test_a_hand_off_that_failed_avoids_both_ends_if_others_are_there(
    text_model: TextModel,
) -> None:
    """The second failure ends the request, so neither end may be tried again."""
    it = lossy(text_model, PAIR)
    it.lose([], KvTransferError("broken"))
    assert [each.avoid for each in it.routes.asked] == [(PREFILL.address, "decode")]


def _left() -> WorkerLostError:
    error = WorkerLostError("gone")
    error.was_leaving = True
    return error


async def test_workers_that_leave_are_no_losses_as_long_as_tokens_come(
    text_model: TextModel,
) -> None:
    it = lossy(text_model)
    it.lose([40], _left())
    it.sink().emit([41])
    it.sink().fail(_left())
    it.sink("third").fail(WorkerDrainingError("draining"))
    await it.it.client.end()
    assert isinstance(it.it.client.raised, WorkerDrainingError), "there is no fourth"
    assert it.ways == [(1, Way.CONTINUE), (2, Way.CONTINUE)]


async def test_a_cancelled_turn_whose_worker_is_lost_ends_as_cancelled(
    text_model: TextModel,
) -> None:
    it = lossy(text_model)
    it.it.turn.cancel()
    it.lose([40])
    await it.it.client.end()
    assert it.it.turn.choices[0].finish_reason is FinishReason.CANCELLED
    assert (it.it.client.raised, it.routes.asked) == (None, [])


async def test_choices_that_end_with_a_lost_one_are_not_told_as_cancelled(
    text_model: TextModel,
) -> None:
    """The client has asked for no cancel: it gets the loss."""
    it = lossy(text_model, plans=[], n=2)
    first, second = it.it.workers.sinks["decode"]
    second.emit([50])
    first.fail(GONE)
    second.finish(replace(DONE, reason=FinishReason.CANCELLED))
    await it.it.client.end()
    assert it.it.client.raised is GONE
    told = [delta for message in it.it.client.messages for delta in message.choices]
    assert [(delta.index, delta.token_count, delta.finish_reason) for delta in told] == [(1, 1, 0)]


async def test_a_turn_that_is_closed_goes_nowhere(text_model: TextModel) -> None:
    it = lossy(text_model)
    it.it.turn.close()
    it.lose([40])
    assert it.routes.asked == []


# ---- what ends workers


def _gone(ran: int) -> WorkerLostError:
    error = WorkerLostError("gone")
    error.open_requests = ran
    return error


async def test_a_death_where_many_ran_counts_against_none_of_them(text_model: TextModel) -> None:
    """What goes on until the fifth loss has lost enough, whoever is to blame."""
    names = ["a", "b", "c", "d"]
    it = lossy(text_model, plans=[on(make_view(name, Role.DECODE)) for name in names])
    it.lose([40], _gone(9))
    for number, name in enumerate(names):
        it.sink(name).emit([41 + number])
        assert it.it.client.raised is None
        it.sink(name).fail(_gone(9))
    await it.it.client.end()
    assert isinstance(it.it.client.raised, RepeatedLossError)
    assert it.ids == [40, 41, 42, 43, 44]


async def test_two_losses_at_one_worker_count_once(text_model: TextModel) -> None:
    """It may be the worker's own fault."""
    again = make_view("decode", Role.DECODE)
    it = lossy(text_model, plans=[on(again), on(OTHER)])
    it.lose([40])
    it.sink("decode").emit([41])
    it.sink("decode").fail(GONE)
    it.sink().emit([42])
    assert it.it.client.raised is None
    it.sink().fail(GONE)
    await it.it.client.end()
    assert isinstance(it.it.client.raised, RepeatedLossError)


async def test_of_many_that_a_death_hit_the_next_deaths_find_the_guilty_one(
    text_model: TextModel,
) -> None:
    """Its prompt ends each worker that computes it: 8 are lost with it, and 12 go on."""
    first = lossy(text_model, plans=[on(OTHER)] * 8 + [on(THIRD)] * 20, running=400)
    redispatcher = first.it.turn.parts.redispatch
    turns = [first, *(lossy(text_model, redispatch=redispatcher) for _ in range(19))]
    for one in turns:
        one.lose([40], _gone(20))
    tried = [one for one in turns if one.it.workers.sinks.get("other")]
    assert tried == turns[:8], "not the 40 that a drain would let compute at once"
    for one in tried:
        one.sink().fail(_gone(300))  # among others, which haven't lost a worker yet
    await asyncio.sleep(0)
    for group in (turns[8:16], turns[16:]):
        for one in group:
            one.sink("third").emit([41])
        await asyncio.sleep(0)
    for one in tried:
        one.sink("third").fail(_gone(300))
        await one.it.client.end()
        assert isinstance(one.it.client.raised, RepeatedLossError)
    assert [one.ids for one in turns[8:]] == [[40, 41]] * 12
    assert not any(one.it.turn.error for one in turns[8:])


def _asked(**changes: Any) -> GenerationRequest:
    sampling = Sampling(max_new_tokens=9, **changes.pop("sampling", {}))
    return GenerationRequest(
        prompt=changes.pop("prompt", Prompt([1, 2])), sampling=sampling, model="m", **changes
    )


@pytest.mark.parametrize(
    ("caller", "asked", "refused"),
    [
        ("a", _asked(request_id="another", sampling={"seed": 5}), True),
        ("b", _asked(), False),
        ("a", _asked(prompt=Prompt([1, 2, 3])), False),
        ("a", _asked(sampling={"temperature": 0.5}), False),
        ("a", _asked(adapter="x"), False),
    ],
)
def test_an_equal_request_of_the_same_caller_is_refused(
    caller: str, asked: GenerationRequest, *, refused: bool
) -> None:
    repeated, measured = RepeatedLosses(), Samples()
    repeated.check("a", asked)
    repeated.add("a", _asked())
    with pytest.raises(RepeatedLossError) if refused else contextlib.nullcontext():
        repeated.check(caller, asked)
    assert measured.grown("millstream_repeated_losses_refused_total", model="m") == refused


def test_images_and_vectors_are_told_apart_by_their_content() -> None:
    repeated = RepeatedLosses()
    image = DiffusionRequest(kind=Kind.IMAGE, prompt="a cat", input_image=b"png", request_id="1")
    vectors = EmbedRequest(inputs=["a", [1, 2]], request_id="1")
    for request in (image, vectors):
        repeated.add("a", request)
    for equal in (replace(image, request_id="2", seed=3), replace(vectors, request_id="2")):
        with pytest.raises(RepeatedLossError, match="10 minutes"):
            repeated.check("a", equal)
    repeated.check("a", replace(image, input_image=b"gif"))
    repeated.check("a", replace(vectors, inputs=["a", [1], [2]]))


def test_what_is_remembered_is_bounded_and_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    repeated, now = RepeatedLosses(), [0.0]
    monkeypatch.setattr("millstream_server.processor.losses.time.monotonic", lambda: now[0])
    for number in range(1025):
        repeated.add("a", _asked(prompt=Prompt([number])))
    repeated.check("a", _asked(prompt=Prompt([0])))
    with pytest.raises(RepeatedLossError):
        repeated.check("a", _asked(prompt=Prompt([1])))
    now[0] = 601.0
    repeated.check("a", _asked(prompt=Prompt([1])))


# ---- at most so many at once


async def test_only_so_many_compute_their_prompts_again_at_once(text_model: TextModel) -> None:
    plans = [on(OTHER)] * 20
    it = lossy(text_model, plans=plans, n=12)
    workers, choices = it.it.workers, it.it.turn.choices
    for index, sink in enumerate(workers.sinks["decode"]):
        sink.emit([40 + index])
    for sink in workers.sinks["decode"]:
        sink.fail(GONE)
    others = workers.sinks["other"]
    assert len(others) == 8
    others[0].emit([50])
    others[0].emit([51])
    others[1].finish(DONE)
    await asyncio.sleep(0)
    assert len(others) == 10, "one for a prompt that was computed, one for an end"
    assert [list(r.token_ids)[-1] for r in workers.asked["other"][8:]] == [48, 49], "in order"
    choices[10].cancel()
    assert choices[10].result is not None
    assert choices[10].result.reason is FinishReason.CANCELLED
    others[2].emit([50])
    await asyncio.sleep(0)
    assert [list(r.token_ids)[-1] for r in workers.asked["other"][10:]] == [51]
    it.it.turn.close()


async def test_a_prompt_that_is_given_up_makes_room_for_another_one(
    text_model: TextModel,
) -> None:
    """Its decode worker is there, but what it waits for is lost."""
    pair = Plan((PlannedLeg(Role.PREFILL, PREFILL), PlannedLeg(Role.DECODE, OTHER)), ("p", "o"))
    it = lossy(text_model, PAIR, plans=[pair] * 20, n=10)
    workers = it.it.workers
    for sink in workers.sinks["decode"]:
        sink.fail(_left())
    assert len(workers.asked["other"]) == 8
    workers.sinks["prefill"][10].fail(GONE)
    assert len(workers.asked["other"]) == 9, "the ninth; the first waits behind the tenth"
    workers.sinks["other"][1].emit([50])
    workers.sinks["other"][2].emit([50])
    await asyncio.sleep(0)
    assert len(workers.asked["other"]) == 11
    it.it.turn.close()


async def test_a_turn_that_fails_meanwhile_makes_room_for_others(text_model: TextModel) -> None:
    """Of hand-offs in sequence: decode's leg, which would tell of the end, hasn't begun."""
    sequence = replace(PAIR, transfer=KvTransfer("kind", prefill_first=True))
    it = lossy(text_model, sequence, plans=[sequence] * 8 + [on(OTHER)] * 2, n=8)
    prefill, broken = it.it.workers.sinks["prefill"], KvTransferError("broken")
    for sink in prefill[:8]:
        sink.fail(broken)
    assert len(prefill) == 16
    prefill[8].fail(broken)
    await it.it.client.end()
    assert it.it.client.raised is broken
    after = lossy(text_model, redispatch=it.it.turn.parts.redispatch, n=2).it.workers
    for sink in after.sinks["decode"]:
        sink.fail(GONE)
    assert len(after.asked["other"]) == 2


async def test_a_worker_that_hangs_holds_up_nothing_for_long(
    text_model: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redispatch, "_LONGEST_S", 0.01)
    it = lossy(text_model, plans=[on(OTHER)] * 9, n=9)
    for sink in it.it.workers.sinks["decode"]:
        sink.fail(GONE)
    asked = it.it.workers.asked["other"]
    assert len(asked) == 8
    await until(lambda: len(asked) == 9)
    it.it.turn.close()


async def test_a_cancel_takes_back_those_that_wait_before_others_make_room(
    text_model: TextModel,
) -> None:
    """There is no worker for them any more: that isn't told in place of the cancel."""
    it = lossy(text_model, plans=[on(OTHER)] * 8, n=9)
    for sink in it.it.workers.sinks["decode"]:
        sink.fail(GONE)
    it.it.turn.cancel()
    await asyncio.sleep(0)
    for sink in it.it.workers.sinks["other"]:
        sink.finish(replace(DONE, reason=FinishReason.CANCELLED))
    await it.it.client.end()
    assert it.it.client.raised is None
    ends = {choice.finish_reason for choice in it.it.turn.choices}
    assert ends == {FinishReason.CANCELLED}


async def test_a_worker_that_comes_back_with_other_weights_changes_nothing(
    text_model: TextModel,
) -> None:
    lost = make_view("decode", Role.DECODE)
    it = lossy(text_model, on(lost), plans=[on(OTHER)] * 9, n=9)
    for sink in it.it.workers.sinks["decode"]:
        sink.fail(GONE)
    lost.description = make_view("decode", Role.DECODE, weight_version="2").description
    it.sink().emit([50])
    await asyncio.sleep(0)
    assert [asked.weights for asked in it.routes.asked] == [("", "", "simulated")] * 9
    it.it.turn.close()


async def test_a_tenth_of_the_running_requests_may(text_model: TextModel) -> None:
    it = lossy(text_model, plans=[on(OTHER)] * 20, n=12, running=110)
    for sink in it.it.workers.sinks["decode"]:
        sink.fail(_left())
    assert len(it.it.workers.sinks["other"]) == 11
    it.it.turn.close()


async def test_those_that_wait_end_with_their_loss_if_no_worker_is_left(
    text_model: TextModel,
) -> None:
    it = lossy(text_model, plans=[on(OTHER)] * 8, n=9)
    for sink in it.it.workers.sinks["decode"]:
        sink.fail(GONE)
    assert it.it.turn.error is None
    it.sink().emit([50])
    await it.it.client.end()
    assert it.it.client.raised is GONE
