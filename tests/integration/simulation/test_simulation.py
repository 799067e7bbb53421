"""Real Processor, links, routing, workers and hand-offs under faults, in simulated time.

`python -m tests.benchmarks.simulation` runs more of the same, and says how to repeat what fails.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest

from millstream_server.control.engine import Role
from millstream_server.links.slot_stream import SlotStream
from millstream_server.processor.choice import Choice
from millstream_server.processor.text.tokenizer import TextModel
from tests.support.simulation.clock import SimulatedLoop, run
from tests.support.simulation.faults import KINDS
from tests.support.simulation.network import Network
from tests.support.simulation.scenarios import scenario, shrunk
from tests.support.simulation.suite import Fault, Request, Scenario, play

_REQUESTS = 100
_GROUPS = 10
_PER_GROUP = 10


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Keep hundreds of lost workers out of the log, which takes most of the time."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("group", range(_GROUPS))
def test_faults_break_no_promise(text_model: TextModel, group: int) -> None:
    """Ten thousand requests over a hundred seeds."""
    for seed in range(group * _PER_GROUP, (group + 1) * _PER_GROUP):
        result = play(scenario(seed, _REQUESTS), text_model)
        assert not result.wrong, f"seed {seed}: python -m tests.benchmarks.simulation --seed {seed}"


def test_a_seed_gives_the_same_run(text_model: TextModel) -> None:
    one, other = (play(scenario(7, 60), text_model) for _ in range(2))
    assert one.seen
    assert one.seen == other.seen
    assert play(scenario(8, 60), text_model).seen != one.seen


def test_no_fault_means_no_error(text_model: TextModel) -> None:
    quiet = [play(scenario(seed, 60, faults=0), text_model) for seed in range(4)]
    assert not any(result.wrong for result in quiet)
    ends = sum((Counter(result.ends) for result in quiet), Counter())
    assert set(ends) == {"OK", "CANCELLED"}, "some clients cancel"


# ---- it finds what is wrong ----------------------------------------------------------------------


def _alone(*faults: Fault, tokens: int = 20, roles: tuple[Role, ...] = ()) -> Scenario:
    request = Request(at_s=1.0, prompt=(5,), tokens=tokens)
    return Scenario(1, roles or (Role.AGGREGATED,), 0.1, (request,), faults)


def test_it_finds_a_token_that_is_lost(text_model: TextModel) -> None:
    emit = Choice.emit

    def lossy(self: Choice, token_ids: Any, logprobs: Any = ()) -> None:
        emit(self, [token for token in token_ids if token != 9], logprobs)

    with mock.patch.object(Choice, "emit", lossy):
        wrong = play(_alone(), text_model).wrong
    assert any("choice 0 has" in what for what in wrong)


def test_it_finds_a_slot_that_leaks(text_model: TextModel) -> None:
    with mock.patch.object(SlotStream, "cancel", autospec=True):
        cancelled = replace(_alone(tokens=10_000_000).requests[0], tokens=4000, cancel_after_s=1.0)
        wrong = play(replace(_alone(), requests=(cancelled,)), text_model).wrong
    assert "processor still has 1 requests at workers" in wrong
    assert "worker-0 still has 1 open requests" in wrong


def test_it_finds_a_request_that_never_ends(text_model: TextModel) -> None:
    with mock.patch.object(SlotStream, "close", autospec=True):
        wrong = play(_alone(Fault(2.0, "kill", 0)), text_model).wrong
    assert "request 0: it ended 0 times" in wrong


def test_a_failing_scenario_shrinks(text_model: TextModel) -> None:
    """What is left names the one fault and the one request that matter."""

    def fails(tried: Scenario) -> bool:
        with mock.patch.object(SlotStream, "close", autospec=True):
            return bool(play(tried, text_model).wrong)

    faults = tuple(Fault(float(i), kind, i) for i, kind in enumerate(("slow", "kill", "reset")))
    requests = tuple(Request(at_s=0.5 * i, prompt=(5 + i,), tokens=9) for i in range(8))
    least = shrunk(Scenario(3, (Role.AGGREGATED,), 0.1, requests, faults), fails)
    assert len(least.faults) == 1
    assert len(least.requests) == 1


# ---- each fault does what its name says ----------------------------------------------------------

_LOST = {"kill", "vanish", "reset"}
"""The request is lost with the connection."""


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_fault_in_mid_answer(text_model: TextModel, kind: str) -> None:
    roles = (Role.PREFILL, Role.DECODE) if kind == "cut_peers" else (Role.AGGREGATED,)
    result = play(_alone(Fault(2.0, kind, 0, 3.0), tokens=40, roles=roles), text_model)
    assert not result.wrong
    assert set(result.ends) == ({"UNAVAILABLE"} if kind in _LOST else {"OK"})


def test_time_passes_only_when_nothing_is_left_to_do() -> None:
    async def main() -> float:
        loop = asyncio.get_running_loop()
        await asyncio.gather(asyncio.sleep(3600), asyncio.sleep(1))
        return loop.time()

    network = Network(mock.Mock())
    loop = network.loop = SimulatedLoop(network)
    assert run(loop, 0, main) == pytest.approx(3600)
