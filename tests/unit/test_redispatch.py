"""How a choice that has lost its worker goes on, on workers that the test plays itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import pytest

from millstream_server.control.engine import Role
from millstream_server.generation.output import FinishReason, TokenLogprob
from millstream_server.generation.request import GenerationRequest, LogprobOptions, Prompt
from millstream_server.generation.sampling import Ability, Constraint, ConstraintKind, Sampling
from millstream_server.processor.redispatch import Redispatcher
from millstream_server.processor.redispatch_ways import ROWS, Lost, Way, way_of
from millstream_server.processor.text.tokenizer import TextModel
from millstream_server.routing.plan import Plan, PlannedLeg, RoutingRequest
from millstream_server.routing.workers import WorkerView
from millstream_server.runtime.errors import (
    EngineFailedError,
    InvalidRequestError,
    KvTransferError,
    NoWorkerError,
    OverloadedError,
    RepeatedLossError,
    ReplayDifferedError,
    ServingError,
    WorkerDrainingError,
    WorkerLostError,
    WorkerPausedError,
)
from tests.support.processor.played_turn import (
    ALONE,
    DONE,
    PAIR,
    PREFILL,
    Started,
    make_parts,
    make_view,
    start_turn,
)

GONE = WorkerLostError("gone")
OTHER, THIRD = make_view("other", Role.DECODE), make_view("third", Role.DECODE)
REGEX = Constraint(ConstraintKind.REGEX, "[a-z]+")
KNOB_NAMES = {knob.name for knob in dataclasses.fields(Sampling)} - {"seed"}


@dataclass
class Routes:
    """Stands where a router would: other workers, in order, until there is none left."""

    plans: list[Plan] = field(default_factory=lambda: [_on(OTHER), _on(THIRD)])
    asked: list[RoutingRequest] = field(default_factory=list)

    def plan(self, request: RoutingRequest) -> Plan:
        self.asked.append(request)
        if not self.plans:
            raise NoWorkerError("none")
        return self.plans.pop(0)


def _on(view: WorkerView, role: Role = Role.AGGREGATED) -> Plan:
    return Plan((PlannedLeg(role, view),), (view.address,))


@dataclass
class Lossy:
    """A turn with a first worker, and others behind."""

    it: Started
    routes: Routes

    def lose(self, tokens: Sequence[int] = (), error: ServingError = GONE) -> None:
        """Have the first worker send tokens and fail."""
        sink = self.it.workers.sinks["decode"][0]
        if tokens:
            sink.emit(list(tokens))
        sink.fail(error)

    @property
    def ways(self) -> list[tuple[int, Way]]:
        return [(each.tokens, each.way) for each in self.it.turn.redispatches]

    def asked(self, address: str = "other") -> Any:
        (request,) = self.it.workers.asked[address]
        return request

    def sink(self, address: str = "other") -> Any:
        return self.it.workers.sinks[address][-1]

    @property
    def ids(self) -> list[int]:
        return list(self.it.turn.choices[0].received)


def _lossy(
    text_model: TextModel,
    plan: Plan = ALONE,
    *,
    plans: Sequence[Plan] | None = None,
    running: int = 0,
    **turn: Any,
) -> Lossy:
    routes = Routes() if plans is None else Routes(list(plans))
    redispatch = Redispatcher(routes.plan, lambda: running)
    parts = replace(make_parts(), redispatch=redispatch)
    return Lossy(start_turn(text_model, plan, parts=parts, **turn), routes)


# ---- the table


def _lost(**lost: Any) -> Lost:
    knobs = {name: lost.pop(name) for name in list(lost) if name in KNOB_NAMES}
    request = GenerationRequest(
        prompt=lost.pop("prompt", Prompt([1])),
        sampling=Sampling(**{"max_new_tokens": 9, **knobs}),
        logprobs=lost.pop("logprobs", None),
    )
    base: dict[str, Any] = {
        "role": Role.DECODE,
        "engine": "sglang",
        "seed": 1,
        "seed_is_clients": False,
        "resumes": True,
        "given": False,
        "media_held": False,
    }
    return Lost(**{**base, "request": request, **lost})


BARE = {"resumes": False}
PICTURE = Prompt([1], cast("Any", (object(),)))
EACH: dict[str, Lost] = {
    "tokens were given to the client": _lost(given=True),
    "an engine that can't be told what was output": _lost(resumes=False),
    "sampled without a seed": _lost(seed=None),
    "a client's seed, on vLLM": _lost(seed_is_clients=True, engine="vllm"),
    "structured output": _lost(constraint=REGEX),
    "penalties": _lost(repetition_penalty=1.1),
    "logprobs": _lost(logprobs=LogprobOptions(prompt=True)),
    "images and videos": _lost(prompt=PICTURE),
    "text diffusion": _lost(role=Role.DIFFUSION),
}
"""A choice for each row that has no other."""


def test_each_row_is_about_one_feature() -> None:
    assert not [row for row in ROWS if row.holds(_lost())]
    found = {feature: [r.feature for r in ROWS if r.holds(lost)] for feature, lost in EACH.items()}
    assert found == {row.feature: [row.feature] for row in ROWS}


def test_the_page_has_the_rows_of_the_code() -> None:
    page = (Path(__file__).parents[2] / "docs/guarantees.md").read_text("utf-8")
    _, _, table = page.partition("| what a request has | continue | with state | again | replay |")
    cells = [
        [c.strip() for c in line.split("|")[1:-1]]
        for line in table.split("\n\n")[0].split("\n")[2:]
    ]
    order = (Way.CONTINUE, Way.CONTINUE_WITH_STATE, Way.AGAIN, Way.REPLAY)
    told = [[r.feature, *("yes" if way in r.ways else "no" for way in order)] for r in ROWS]
    assert cells == told


@pytest.mark.parametrize(
    ("lost", "way"),
    [
        (_lost(), Way.CONTINUE),
        (_lost(given=True, seed=None, frequency_penalty=1.0), Way.CONTINUE_WITH_STATE),
        (_lost(given=True, seed=None, frequency_penalty=1.0, **BARE), None),
        (_lost(given=True, frequency_penalty=1.0, **BARE), Way.REPLAY),
        (_lost(given=True, seed=None, temperature=0.0, presence_penalty=-1.0, **BARE), Way.REPLAY),
        (_lost(given=False, seed=None, constraint=REGEX, **BARE), Way.AGAIN),
        (_lost(given=True, seed_is_clients=True), Way.CONTINUE),
        (_lost(given=True, seed_is_clients=True, engine="vllm"), Way.REPLAY),
        (_lost(given=True, seed_is_clients=True, engine="vllm", temperature=0.0), Way.CONTINUE),
        (_lost(prompt=PICTURE), None),
        (_lost(prompt=PICTURE, media_held=True), Way.CONTINUE),
        (_lost(role=Role.DIFFUSION), Way.AGAIN),
        (_lost(role=Role.DIFFUSION, given=True), None),
    ],
)
def test_a_request_takes_the_cheapest_way_that_its_features_allow(
    lost: Lost, way: Way | None
) -> None:
    assert way_of(lost) is way


# ---- to continue


async def test_prompt_and_tokens_are_continued_with_what_is_left_of_the_budgets(
    text_model: TextModel,
) -> None:
    it = _lossy(text_model, knobs={"max_new_tokens": 7, "min_new_tokens": 2})
    it.lose([40, 41, 42])
    asked = it.asked()
    assert list(asked.token_ids) == [1, 2, 40, 41, 42]
    assert (asked.sampling.max_new_tokens, asked.sampling.min_new_tokens) == (4, 0)
    (routed,) = it.routes.asked
    assert list(routed.token_ids) == [1, 2, 40, 41, 42]
    assert (routed.avoid, routed.weights) == ("decode", ("", "", "simulated"))
    it.sink().emit([43])
    it.sink().finish(replace(DONE, cached_tokens=5))
    await it.it.client.end()
    usage = it.it.turn.usage()
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (2, 4, 2)
    assert it.ids == [40, 41, 42, 43]
    assert it.ways == [(3, Way.CONTINUE)]
    assert it.it.turn.workers == ("other",)
    assert it.it.admission.left == 1
    (end,) = it.it.client.messages[-1].finished.redispatches
    assert (end.index, end.token_count) == (0, 3)


async def test_an_engine_that_can_is_told_what_was_output(text_model: TextModel) -> None:
    able = make_view("decode", Role.DECODE, Ability.RESUMED_OUTPUT)
    it = _lossy(text_model, _on(able), knobs={"constraint": REGEX})
    it.lose([40, 41])
    assert list(it.asked().token_ids) == [1, 2, 40, 41]
    assert it.asked().resumed_tokens == 2
    assert it.asked().sampling.constraint == REGEX
    assert it.routes.asked[0].resumes
    assert it.ways == [(2, Way.CONTINUE_WITH_STATE)]
    it.it.turn.close()


async def test_what_the_lost_part_still_sends_goes_nowhere(text_model: TextModel) -> None:
    """Prefill is lost, and decode isn't."""
    pair = Plan((PlannedLeg(Role.PREFILL, PREFILL), PlannedLeg(Role.DECODE, OTHER)), ("p", "o"))
    it = _lossy(text_model, PAIR, plans=[pair])
    it.it.workers.sinks["prefill"][0].fail(GONE)
    assert it.it.workers.cancels == ["decode"]
    first, second = it.it.workers.asked["prefill"]
    assert first.ticket != second.ticket == it.asked().ticket
    it.it.workers.sinks["prefill"][0].finish(DONE)  # too late
    it.sink().emit([40])
    it.it.workers.sinks["prefill"][1].fail(GONE)  # the KV cache has come
    it.sink().finish(DONE)
    await it.it.client.end()
    assert it.it.client.raised is None
    assert it.ways == [(0, Way.CONTINUE)]


async def test_a_new_prefill_worker_that_is_lost_before_the_next_token_is_a_second_loss(
    text_model: TextModel,
) -> None:
    pair = Plan((PlannedLeg(Role.PREFILL, PREFILL), PlannedLeg(Role.DECODE, OTHER)), ("p", "o"))
    it = _lossy(text_model, PAIR, plans=[pair])
    it.lose([40])
    it.it.workers.sinks["prefill"][1].fail(GONE)
    await it.it.client.end()
    assert isinstance(it.it.client.raised, RepeatedLossError)
    assert it.it.workers.cancels == ["prefill", "other"]


async def test_each_choice_goes_on_by_itself(text_model: TextModel) -> None:
    seeded = Plan((PlannedLeg(Role.AGGREGATED, make_view("decode", Role.DECODE, Ability.SEED)),))
    able = make_view("other", Role.DECODE, Ability.SEED)
    it = _lossy(text_model, seeded, plans=[_on(able)], n=2)
    first, second = it.it.workers.sinks["decode"]
    first.emit([40, 41])
    second.emit([50])
    second.fail(GONE)
    seed = it.it.turn.seed
    assert seed is not None
    assert list(it.asked().token_ids) == [1, 2, 50]
    assert it.asked().sampling.seed == seed + 1
    first.finish(DONE)
    it.sink().finish(DONE)
    await it.it.client.end()
    assert [list(choice.token_ids) for choice in it.it.turn.choices] == [[40, 41], [50]]
    assert it.it.admission.left == 1


@pytest.mark.parametrize(
    ("knobs", "tokens", "reason"),
    [
        ({"max_new_tokens": 2}, [40, 41], FinishReason.LENGTH),
        ({"stop_token_ids": (41,)}, [40, 41], FinishReason.STOP),
        ({"stop_token_ids": (41,), "max_new_tokens": 2}, [40, 41], FinishReason.STOP),
        ({"stop_token_ids": (41,), "constraint": REGEX}, [40, 41], FinishReason.STOP),
    ],
)
async def test_an_end_that_only_the_lost_worker_could_tell_is_told(
    text_model: TextModel, knobs: dict[str, Any], tokens: list[int], reason: FinishReason
) -> None:
    it = _lossy(text_model, knobs=knobs)
    it.lose(tokens)
    await it.it.client.end()
    assert it.it.turn.choices[0].finish_reason is reason
    assert (it.it.client.raised, it.routes.asked) == (None, [])


async def test_a_stop_token_below_the_least_number_is_no_end(text_model: TextModel) -> None:
    it = _lossy(text_model, knobs={"stop_token_ids": (41,), "min_new_tokens": 3})
    it.lose([40, 41])
    assert it.asked().sampling.min_new_tokens == 1


async def test_a_seed_that_a_generator_begins_with_is_not_used_twice(text_model: TextModel) -> None:
    """VLLM's generator would repeat the random numbers of the answer's beginning."""

    def on(name: str) -> WorkerView:
        view = make_view(name, Role.DECODE, Ability.SEED)
        assert view.description
        engine = replace(view.description.engine, engine="vllm")
        view.description = replace(view.description, engine=engine)
        return view

    it = _lossy(text_model, _on(on("decode")), plans=[_on(on("other"))])
    it.lose([40])
    first = it.it.workers.asked["decode"][0].sampling.seed
    assert first is not None
    assert it.asked().sampling.seed not in (None, first)


# ---- again, and replayed


async def test_what_the_client_does_not_have_is_dropped_if_it_can_not_be_continued(
    text_model: TextModel,
) -> None:
    it = _lossy(text_model, knobs={"constraint": REGEX})
    it.lose([40, 41])
    assert list(it.asked().token_ids) == [1, 2]
    it.sink().emit([50])
    it.sink().finish(DONE)
    await it.it.client.end()
    assert it.ids == [50]
    assert it.ways == [(0, Way.AGAIN)]


async def test_a_replay_drops_what_the_client_has(text_model: TextModel) -> None:
    it = _lossy(text_model, logprobs=LogprobOptions(), temperature=0.0)
    first = it.it.workers.sinks["decode"][0]
    first.emit([40, 41], [TokenLogprob(40, -1.0), TokenLogprob(41, -2.0)])
    it.it.client._pull()
    first.emit([42], [TokenLogprob(42, -3.0)])
    first.fail(GONE)
    assert list(it.asked().token_ids) == [1, 2]
    assert it.asked().logprobs == LogprobOptions()
    it.sink().emit([40], [TokenLogprob(40, -1.0)])
    it.sink().emit([41, 42, 43], [TokenLogprob(i, -float(i)) for i in (41, 42, 43)])
    it.sink().finish(DONE)
    await it.it.client.end()
    assert it.ids == [40, 41, 42, 43]
    sent = [e for m in it.it.client.messages for c in m.choices for e in c.logprobs]
    assert [round(entry.logprob) for entry in sent] == [-1, -2, -3, -43]
    assert it.ways == [(3, Way.REPLAY)]


@pytest.mark.parametrize("ends", [False, True], ids=["another token", "an end before"])
async def test_a_replay_that_differs_ends_the_request(text_model: TextModel, *, ends: bool) -> None:
    it = _lossy(text_model, knobs={"constraint": REGEX}, temperature=0.0)
    it.it.workers.sinks["decode"][0].emit([40, 41])
    it.it.client._pull()
    it.it.workers.sinks["decode"][0].fail(GONE)
    it.sink().emit([40])
    if ends:
        it.sink().finish(DONE)
    else:
        it.sink().emit([50])
        assert it.it.workers.cancels == ["other"]
    await it.it.client.end()
    assert isinstance(it.it.client.raised, ReplayDifferedError)
    assert it.ids == [40, 41], "what the client has stays"


# ---- not


@pytest.mark.parametrize(
    "error",
    [WorkerPausedError("paused"), OverloadedError("full"), InvalidRequestError.of("x", "wrong")],
)
async def test_a_worker_that_is_not_lost_keeps_its_request(
    text_model: TextModel, error: ServingError
) -> None:
    it = _lossy(text_model)
    it.lose([40], error)
    await it.it.client.end()
    assert (it.it.client.raised, it.routes.asked) == (error, [])


async def test_without_another_worker_the_loss_is_told(text_model: TextModel) -> None:
    it = _lossy(text_model, plans=[])
    it.lose([40])
    await it.it.client.end()
    assert it.it.client.raised is GONE
    assert it.ids == [40]
    assert it.it.admission.left


async def test_what_the_other_worker_refuses_as_wrong_is_told_as_the_loss(
    text_model: TextModel,
) -> None:
    it = _lossy(text_model)
    it.lose([40])
    it.sink().fail(InvalidRequestError.of("prompt", "too long by a token"))
    await it.it.client.end()
    assert it.it.client.raised is GONE


@pytest.mark.parametrize("error", [GONE, EngineFailedError("dead"), KvTransferError("broken")])
async def test_a_request_that_loses_two_workers_goes_to_no_third(
    text_model: TextModel, error: ServingError
) -> None:
    it = _lossy(text_model)
    it.lose([40], error)
    it.sink().emit([41])
    it.sink().fail(error)
    await it.it.client.end()
    assert isinstance(it.it.client.raised, RepeatedLossError)
    assert not it.it.client.raised.retryable
    assert "third" not in it.it.workers.asked
    assert it.ids == [40, 41]


def _left() -> WorkerLostError:
    error = WorkerLostError("gone")
    error.was_leaving = True
    return error


async def test_workers_that_leave_are_no_losses_as_long_as_tokens_come(
    text_model: TextModel,
) -> None:
    it = _lossy(text_model)
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
    it = _lossy(text_model)
    it.it.turn.cancel()
    it.lose([40])
    await it.it.client.end()
    assert it.it.turn.choices[0].finish_reason is FinishReason.CANCELLED
    assert (it.it.client.raised, it.routes.asked) == (None, [])


async def test_a_turn_that_is_closed_goes_nowhere(text_model: TextModel) -> None:
    it = _lossy(text_model)
    it.it.turn.close()
    it.lose([40])
    assert it.routes.asked == []


# ---- at most so many at once


async def test_only_so_many_compute_their_prompts_again_at_once(text_model: TextModel) -> None:
    plans = [_on(OTHER)] * 20
    it = _lossy(text_model, plans=plans, n=12)
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
    assert len(others) == 10, "one for a prompt that was computed, one for an end"
    assert [list(r.token_ids)[-1] for r in workers.asked["other"][8:]] == [48, 49], "in order"
    choices[10].cancel()
    assert choices[10].result is not None
    assert choices[10].result.reason is FinishReason.CANCELLED
    others[2].emit([50])
    assert [list(r.token_ids)[-1] for r in workers.asked["other"][10:]] == [51]
    it.it.turn.close()


async def test_a_tenth_of_the_running_requests_may(text_model: TextModel) -> None:
    it = _lossy(text_model, plans=[_on(OTHER)] * 20, n=12, running=110)
    for sink in it.it.workers.sinks["decode"]:
        sink.fail(GONE)
    assert len(it.it.workers.sinks["other"]) == 11
    it.it.turn.close()


async def test_those_that_wait_end_with_their_loss_if_no_worker_is_left(
    text_model: TextModel,
) -> None:
    it = _lossy(text_model, plans=[_on(OTHER)] * 8, n=9)
    for sink in it.it.workers.sinks["decode"]:
        sink.fail(GONE)
    assert it.it.turn.error is None
    it.sink().emit([50])
    await it.it.client.end()
    assert it.it.client.raised is GONE
