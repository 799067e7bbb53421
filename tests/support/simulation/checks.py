"""Which promises of docs/guarantees.md the answers of one client break."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from millstream_server.processor.text.tokenizer import TextModel
from millstream_server.runtime.errors import Code
from tests.support.simulation.answers import wrong_answer, wrong_resumed
from tests.support.simulation.clients import End, Talk
from tests.support.simulation.faults import LIE
from tests.support.simulation.requests import Chat, Completion, Course, tokens_of
from tests.support.simulation.ways import GIVEN, features, way, wrong_way

if TYPE_CHECKING:
    from tests.support.simulation.suite import Scenario

_OURS = frozenset({Code.INTERNAL, Code.UNKNOWN, Code.INVALID_ARGUMENT, Code.UNIMPLEMENTED})
"""No fault explains these."""
_SPARED = frozenset({"kill", "vanish", "die", "reset", "drain", "wedge"})
"""One of these faults costs no answer that can go on."""


def wrong_talk(talk: Talk, scenario: Scenario, text: TextModel) -> list[str]:
    """Return what is wrong with what a client got."""
    if len(talk.ends) != 1:
        return [f"it ended {len(talk.ends)} times"]
    lies = (LIE,) if any(fault.kind == "lie" for fault in scenario.faults) else ()
    found = _wrong_end(talk, scenario, lies=bool(lies))
    for number, answer in enumerate(talk.answers):
        course = _course(talk, number, scenario, text)
        turn = talk.request.turns[number] if isinstance(talk.request, Chat) else None
        read = turn if isinstance(talk.request, Chat) and talk.request.events else None
        if turn is not None and answer.resumed:
            wrong = wrong_resumed(answer, course, read, scenario.form)
        else:
            wrong = wrong_answer(answer, course, lies, read, scenario.form)
        if answer.cancelled and (turn is None or turn.cancel_after_s is None):
            wrong.append("it was cancelled, and nobody had asked for that")
        found += [f"answer {number}: {what}" for what in wrong]
        for finished in answer.finished:
            knobs, machine = talk.request.knobs, scenario.machine
            found += filter(None, (wrong_way(knobs, machine, d) for d in finished.redispatches))
    return found


def _course(talk: Talk, number: int, scenario: Scenario, text: TextModel) -> Course:
    request = talk.request
    if isinstance(request, Completion):
        if talk.answers[number].resumed and not scenario.machine.by_position:
            # vLLM's draws begin anew with the client's new request: any draw is right.
            request = replace(request, knobs=replace(request.knobs, seed=None))
        return request.course(scenario.machine, text)
    prompt = tokens_of(talk.asked[number], scenario.form)
    says = request.turns[number].written(scenario.form)
    return Course(request.knobs, scenario.machine, text, prompt, says=says)


def _wrong_end(talk: Talk, scenario: Scenario, *, lies: bool) -> list[str]:
    (end,), request = talk.ends, talk.request
    left = request.cancel_after_s is not None or request.deadline_s is not None
    turns = len(request.turns) if isinstance(request, Chat) else 1
    finished = bool(talk.answers and talk.answers[-1].finished)
    if end.code is Code.OK:  # a Processor that drains may end a conversation between two turns
        whole = len(talk.answers) == turns or bool(scenario.faults)
        return [] if finished and whole else ["an OK call has no whole answer"]
    if finished and not left and isinstance(request, Completion):
        return [f"a finished answer ended with {end.code.name}"]
    return [] if _explained(end, talk, scenario, left=left, lies=lies) else [f"it ended as {end}"]


def _explained(end: End, talk: Talk, scenario: Scenario, *, left: bool, lies: bool) -> bool:
    """Whether a failure is one that the client, a fault or a small queue explains."""
    if end.code is Code.RESOURCE_EXHAUSTED and scenario.max_running:
        return True
    if end.code is Code.ABORTED:
        told = end.reason == "REPEATED_LOSS" or (lies and end.reason == "REPLAY_DIFFERED")
        return bool(scenario.faults) and told
    if end.code is Code.UNAVAILABLE and _could_go_on(talk.request, scenario):
        return False
    return end.code not in _OURS and (left or bool(scenario.faults))


def _could_go_on(request: Completion | Chat, scenario: Scenario) -> bool:
    """Whether no more than one worker is lost, others of its role are there, and a way is right."""
    kinds = [fault.kind for fault in scenario.faults]
    spared = all(count > 1 for count in Counter(scenario.workers).values())
    found = features(request.knobs, scenario.machine)
    return spared and len(kinds) == 1 and kinds[0] in _SPARED and way([*found, GIVEN]) is not None
