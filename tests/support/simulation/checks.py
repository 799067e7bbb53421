"""Which promises of docs/guarantees.md the answers of one client break."""

from __future__ import annotations

from typing import TYPE_CHECKING

from millstream_server.processor.text.tokenizer import TextModel
from millstream_server.runtime.errors import Code
from tests.support.simulation.answers import Answer, wrong_answer, wrong_resumed
from tests.support.simulation.clients import Talk
from tests.support.simulation.faults import LIE
from tests.support.simulation.requests import Chat, Completion, Course, prompt_of
from tests.support.simulation.ways import wrong_way

if TYPE_CHECKING:
    from tests.support.simulation.suite import Scenario

_OURS = frozenset({Code.INTERNAL, Code.UNKNOWN, Code.INVALID_ARGUMENT, Code.UNIMPLEMENTED})
"""No fault explains these."""


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
            ways = (wrong_way(course.knobs, scenario.machine, d) for d in finished.redispatches)
            found += filter(None, ways)
    return found


def _course(talk: Talk, number: int, scenario: Scenario, text: TextModel) -> Course:
    request = talk.request
    if isinstance(request, Completion):
        return request.course(scenario.machine, text)
    prompt = prompt_of(talk.asked[number], scenario.form, text)
    says = request.turns[number].written(scenario.form)
    return Course(request.knobs, scenario.machine, text, len(prompt), says=says)


def _wrong_end(talk: Talk, scenario: Scenario, *, lies: bool) -> list[str]:
    (end,), request = talk.ends, talk.request
    ours = request.cancel_after_s is not None or request.deadline_s is not None
    last = talk.answers[-1] if talk.answers else Answer()
    if end.code is Code.OK:
        whole = len(talk.answers) == _answers(talk) or bool(scenario.faults)
        return [] if last.finished and whole else ["an OK call has no whole answer"]
    whole = len(last.finished) > 0 and len(talk.answers) == _answers(talk)
    if whole and not ours and isinstance(request, Completion):
        return [f"a finished answer ended with {end.code.name}"]
    if end.code is Code.RESOURCE_EXHAUSTED and scenario.max_running:
        return []
    if end.code is Code.ABORTED:
        right = {"REPEATED_LOSS"} | ({"REPLAY_DIFFERED"} if lies else set())
        return [] if scenario.faults and end.reason in right else [f"{end}"]
    if end.code in _OURS or (not scenario.faults and not ours):
        return [f"{end.code.name} {end.reason}: {end.message}"]
    return []


def _answers(talk: Talk) -> int:
    return len(talk.request.turns) if isinstance(talk.request, Chat) else 1
