"""Deliberate faults in our own code: the simulator's checker must find each of them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest

from millstream_client import chat as client_chat
from millstream_client import connection as client_connection
from millstream_server.control.engine import Role
from millstream_server.engines.simulated.prefix_cache import PrefixCache
from millstream_server.generation.output import LogprobColumns
from millstream_server.links.slot_stream import SlotStream
from millstream_server.processor import redispatch, successor
from millstream_server.processor.admission import Admission
from millstream_server.processor.answer import Answer
from millstream_server.processor.choice import Choice
from millstream_server.processor.dispatch import Dispatch
from millstream_server.processor.redispatch_ways import Way
from millstream_server.processor.successor import Successor
from millstream_server.processor.text.stops import StopMatcher
from millstream_server.processor.turn import Turn as ServedTurn
from tests.support.simulation.engine import Machine
from tests.support.simulation.requests import Chat, Completion, Knobs, Turn
from tests.support.simulation.rpc import SimulatedCall
from tests.support.simulation.suite import Fault, Scenario, play

Patch = AbstractContextManager[Any]
_KILLS = (Fault(1.6, "kill", 0, 3.0), Fault(1.6, "kill", 1, 3.0))
_PAIR = (Role.AGGREGATED,) * 2


def _made(knobs: Knobs = Knobs(30), **more: Any) -> Scenario:  # noqa: B008 - it is frozen
    requests = (Completion(prompt=(5,), knobs=knobs),)
    given = {"workers": _PAIR, "step_s": 0.1, "requests": requests, "faults": (), **more}
    return Scenario(1, **given)


def _changed(kind: Any, name: str, change: Callable[[Any], Any]) -> Patch:
    """Replace a method by ``change`` of it."""
    return mock.patch.object(kind, name, change(getattr(kind, name)))


def _without(kind: Any, name: str) -> Patch:
    return mock.patch.object(kind, name, autospec=True, return_value=None)


# ---- what is changed -----------------------------------------------------------------------------


def _loses_a_token() -> Patch:
    def change(emit: Any) -> Any:
        return lambda self, ids, logprobs=(): emit(self, [i for i in ids if i != 9], logprobs)

    return _changed(Choice, "emit", change)


def _sends_the_last_token_again() -> Patch:
    def received(self: Choice) -> Any:
        return (self.token_ids[:] + type(self.token_ids)("I", self.unsent))[:-1]

    return mock.patch.object(Choice, "received", property(received))


def _keeps_the_budget() -> Patch:
    def change(continued: Any) -> Any:
        def kept(request: Any, tokens: Any, resumed: int) -> Any:
            made = continued(request, tokens, resumed)
            return replace(made, sampling=request.sampling)

        return kept

    return _changed(successor, "_continued", change)


def _continues_whatever_is_asked() -> Patch:
    return mock.patch.object(redispatch, "way_of", return_value=Way.CONTINUE)


def _goes_on_nowhere() -> Patch:
    return mock.patch.object(redispatch, "way_of", return_value=None)


def _gives_a_replay_out() -> Patch:
    def emit(self: Successor, token_ids: Any, logprobs: Any = ()) -> None:
        self._replayed = len(self._tokens)
        self._choice.emit(token_ids, logprobs)

    return mock.patch.object(Successor, "emit", emit)


def _drops_logprobs() -> Patch:
    return _changed(
        LogprobColumns, "extend", lambda extend: lambda self, more: extend(self, list(more)[1:])
    )


def _gives_all_choices_one_seed() -> Patch:
    def change(start: Any) -> Any:
        def same(self: Any, leg: Any, planned: Any, _: Any, changes: Any) -> None:
            start(self, leg, planned, mock.Mock(index=0), changes)

        return same

    return _changed(Dispatch, "_start", change)


def _counts_usage_twice() -> Patch:
    def change(usage: Any) -> Any:
        def twice(self: ServedTurn) -> Any:
            used = usage(self)
            return replace(used, completion_tokens=2 * used.completion_tokens)

        return twice

    return _changed(ServedTurn, "usage", change)


def _sends_two_statuses() -> Patch:
    return _changed(SimulatedCall, "complete", lambda end: lambda self: (end(self), end(self)))


def _shows_stops() -> Patch:
    return mock.patch.object(StopMatcher, "push", lambda _, text: (text, None))


def _loses_events() -> Patch:
    return _changed(Answer, "take", lambda take: lambda self: take(self)[:-1])


def _forgets_the_admission() -> Patch:
    return _without(Admission, "leave")


def _forgets_kv_blocks() -> Patch:
    return _without(PrefixCache, "release")


def _cancels_nothing() -> Patch:
    return _without(SlotStream, "cancel")


def _tells_no_loss() -> Patch:
    return _without(SlotStream, "close")


def _begins_a_chat_anew() -> Patch:
    return mock.patch.object(client_chat, "go_on")


def _begins_a_completion_anew() -> Patch:
    return mock.patch.object(client_connection, "go_on_with")


# ---- what finds it -------------------------------------------------------------------------------

_STATE = Knobs(30, penalty=True)
_LOGPROBS = Knobs(30, logprobs=True)
_SEEDED = Knobs(30, n=2, random=True, seed=3)
_CANCELLED = (Completion(prompt=(5,), knobs=Knobs(4000), cancel_after_s=1.0),)
_CHAT = Chat(
    turns=(Turn("Grüße, Grüße", "hm", (("f", "日本"),)),), knobs=Knobs(400, ignore_eos=False)
)
_GOES_ON = Chat(
    turns=(Turn("Grüße, " * 6 + "!"),), knobs=Knobs(400, ignore_eos=False), library=True
)
_FRONTS: dict[str, Any] = {"workers": (Role.AGGREGATED,), "processors": 2,
           "faults": (Fault(2.0, "kill_front", 0, 60.0),)}  # fmt: skip


@dataclass(frozen=True)
class Mutation:
    """A fault of ours, a scenario in which it shows, and what the checker says."""

    patch: Callable[[], Patch]
    scenario: Scenario
    says: str


MUTATIONS = (
    Mutation(_loses_a_token, _made(), "token 3 of choice 0 is 10, not one of [9]"),
    Mutation(_sends_the_last_token_again, _made(faults=_KILLS[:1]), "of choice 0 is"),
    Mutation(_sends_the_last_token_again, _made(faults=_KILLS[1:]), "of choice 0 is"),
    Mutation(_keeps_the_budget, _made(faults=_KILLS[:1]), "and 30 end it"),
    Mutation(_keeps_the_budget, _made(faults=_KILLS[1:]), "and 30 end it"),
    Mutation(_continues_whatever_is_asked, _made(_STATE, faults=_KILLS[:1]), "of choice 0 is"),
    Mutation(_continues_whatever_is_asked, _made(_STATE, faults=_KILLS[1:]), "of choice 0 is"),
    Mutation(_goes_on_nowhere, _made(faults=_KILLS[:1]), "it ended as End(code=<Code.UNAVAILABLE"),
    Mutation(_goes_on_nowhere, _made(faults=_KILLS[1:]), "it ended as End(code=<Code.UNAVAILABLE"),
    Mutation(_gives_a_replay_out, _made(_LOGPROBS, faults=_KILLS[:1]), "of choice 0 is"),
    Mutation(_gives_a_replay_out, _made(_LOGPROBS, faults=_KILLS[1:]), "of choice 0 is"),
    Mutation(_drops_logprobs, _made(_LOGPROBS, pacing_s=0.35), "has logprobs of"),
    Mutation(_gives_all_choices_one_seed, _made(_SEEDED), "of choice 1"),
    Mutation(_counts_usage_twice, _made(), "60 tokens were counted, 30 came"),
    Mutation(_sends_two_statuses, _made(), "ended as"),
    Mutation(_shows_stops, _made(Knobs(40, stop="+")), "and 8 end it"),
    Mutation(_loses_events, _made(requests=(_CHAT,)), "it has"),
    Mutation(_forgets_the_admission, _made(), "processor-0 still has 1 running"),
    Mutation(_forgets_kv_blocks, _made(), "KV blocks"),
    Mutation(_cancels_nothing, _made(requests=_CANCELLED), "still has 1 requests at workers"),
    Mutation(_tells_no_loss, _made(workers=_PAIR[:1], faults=_KILLS[:1]), "it ended 0 times"),
    Mutation(_begins_a_chat_anew, _made(requests=(_GOES_ON,), **_FRONTS), "2 starts and 1 ends"),
    Mutation(
        _begins_a_completion_anew,
        _made(requests=(Completion(prompt=(5,), knobs=Knobs(30), library=True),), **_FRONTS),
        "of choice 0 is",
    ),
)  # fmt: skip


def test_none_of_the_scenarios_is_wrong_by_itself() -> None:
    assert not [wrong for each in MUTATIONS for wrong in play(each.scenario).wrong]


@pytest.mark.parametrize(
    "patch", dict.fromkeys(each.patch for each in MUTATIONS), ids=lambda patch: patch.__name__[1:]
)
def test_the_checker_finds(patch: Callable[[], Patch]) -> None:
    """Where a worker is killed, either of two: the request runs at one of them."""
    tried = [each for each in MUTATIONS if each.patch is patch]
    wrong = []
    for each in tried:
        with patch():
            wrong += play(each.scenario).wrong
    assert any(tried[0].says in what for what in wrong), wrong


def test_the_checker_finds_a_way_that_the_table_does_not_allow() -> None:
    """Also where the tokens are right: greedy ones with logprobs, continued."""
    with _continues_whatever_is_asked():
        wrong = [
            what
            for kill in _KILLS
            for what in play(_made(_LOGPROBS, faults=(kill,), machine=Machine(resumes=False))).wrong
        ]
    assert any("it went on by REDISPATCH_WAY_CONTINUE" in what for what in wrong), wrong
