"""Which worker gets a request."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import pytest

from millstream_server.engines.base import EngineLoad
from millstream_server.routing.policy import (
    AFFINITY_SLACK,
    LeastLoaded,
    PolicyName,
    RoundRobin,
    make_policy,
)


@dataclass
class Worker:
    address: str
    in_flight: int = 0
    load: EngineLoad | None = None


def _load(running: int, queued: int = 0) -> EngineLoad:
    return EngineLoad(
        running_requests=running, queued_requests=queued, used_blocks=0, total_blocks=1
    )


def test_round_robin_takes_each_in_its_turn() -> None:
    a, b, c = Worker("a"), Worker("b"), Worker("c")
    policy = RoundRobin()
    picked = [policy.pick([a, b, c], None) for _ in range(4)]
    assert [worker.address for worker in picked] == ["a", "b", "c", "a"]


def test_round_robin_keeps_a_conversation_where_it_was_while_it_is_there() -> None:
    a, b = Worker("a"), Worker("b")
    policy = RoundRobin()
    assert [policy.pick([a, b], b) for _ in range(3)] == [b] * 3
    assert policy.pick([a], b) is a
    assert policy.pick([a, b], None) is b


def test_least_loaded_counts_ours_or_the_reported_whichever_is_more() -> None:
    ours = Worker("a", in_flight=3)
    theirs = Worker("b", in_flight=1, load=_load(2, queued=2))
    idle = Worker("c", in_flight=2, load=_load(0))
    assert LeastLoaded().pick([ours, theirs, idle], None) is idle
    assert LeastLoaded().pick([ours, theirs], None) is ours


def test_least_loaded_spreads_ties() -> None:
    workers = [Worker(name) for name in "abcd"]
    policy = LeastLoaded()
    picked = Counter(policy.pick(workers, None).address for _ in range(40))
    assert picked == {"a": 10, "b": 10, "c": 10, "d": 10}


def test_a_conversation_stays_within_the_slack_and_leaves_beyond() -> None:
    idle, home = Worker("a"), Worker("b", in_flight=AFFINITY_SLACK)
    assert LeastLoaded().pick([idle, home], home) is home
    home.in_flight += 1
    assert LeastLoaded().pick([idle, home], home) is idle
    assert LeastLoaded().pick([idle], home) is idle


@pytest.mark.parametrize("name", PolicyName)
def test_every_name_makes_a_policy_of_its_own(name: PolicyName) -> None:
    assert make_policy(name) is not make_policy(name)
    only = Worker("a")
    assert make_policy(name).pick([only], None) is only
