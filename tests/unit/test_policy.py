"""Which worker gets a request."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest

from millstream_server.routing.kv_aware import make_policy
from millstream_server.routing.plan import RoutingRequest
from millstream_server.routing.policy import (
    AFFINITY_SLACK,
    BestOfTwo,
    PolicyName,
    RoutingPolicy,
    requests_at,
)
from millstream_server.routing.prefix.prefixes import Prefixes
from millstream_server.routing.workers import WorkerView
from tests.support.processor.views import load

NEW = RoutingRequest(model="m")


def _of(home: str) -> RoutingRequest:
    """Make a request of a conversation whose last turn ran at ``home``."""
    return RoutingRequest(model="m", session=(home,))


def _pick(policy: RoutingPolicy, request: RoutingRequest, views: Sequence[WorkerView]) -> str:
    picked = policy.pick(request, views)
    assert picked
    return picked.address


def _round_robin() -> RoutingPolicy:
    return make_policy(PolicyName.ROUND_ROBIN)


def _least_loaded() -> RoutingPolicy:
    return make_policy(PolicyName.LEAST_LOADED)


def test_round_robin_takes_one_after_the_other() -> None:
    views = [WorkerView("a"), WorkerView("b"), WorkerView("c")]
    policy = _round_robin()
    assert [_pick(policy, NEW, views) for _ in range(4)] == ["a", "b", "c", "a"]


def test_round_robin_keeps_a_conversation_where_it_was_while_it_is_there() -> None:
    a, b = WorkerView("a"), WorkerView("b")
    policy = _round_robin()
    assert [_pick(policy, _of("b"), [a, b]) for _ in range(3)] == ["b"] * 3
    assert _pick(policy, _of("b"), [a]) == "a"
    assert [_pick(policy, NEW, [a, b]) for _ in range(2)] == ["a", "b"]


def test_least_loaded_counts_ours_or_the_reported_whichever_is_more() -> None:
    ours = WorkerView("a", in_flight=3)
    theirs = WorkerView("b", in_flight=1, load=load(2, queued=2))
    idle = WorkerView("c", in_flight=2, load=load(0))
    assert [requests_at(view) for view in (ours, theirs, idle)] == [3, 4, 2]
    assert _pick(_least_loaded(), NEW, [ours, theirs, idle]) == "c"
    assert _pick(_least_loaded(), NEW, [ours, theirs]) == "a"


def test_least_loaded_spreads_ties() -> None:
    views = [WorkerView(name) for name in "abcd"]
    policy = _least_loaded()
    picked = Counter(_pick(policy, NEW, views) for _ in range(40))
    assert picked == {"a": 10, "b": 10, "c": 10, "d": 10}


def test_a_conversation_stays_within_the_slack_and_leaves_beyond() -> None:
    idle, home = WorkerView("a"), WorkerView("b", in_flight=AFFINITY_SLACK)
    assert _pick(_least_loaded(), _of("b"), [idle, home]) == "b"
    home.in_flight += 1
    assert _pick(_least_loaded(), _of("b"), [idle, home]) == "a"
    assert _pick(_least_loaded(), _of("b"), [idle]) == "a"


def test_power_of_two_takes_the_better_of_two_and_never_the_worst() -> None:
    views = [WorkerView(str(number), in_flight=number) for number in range(10)]
    policy = BestOfTwo(random.Random(1))
    picked = Counter(_pick(policy, NEW, views) for _ in range(2000))
    assert "9" not in picked, "the worst loses against any other"
    assert set(picked) == {str(number) for number in range(9)}
    assert picked["0"] > picked["4"] > picked["8"]


def test_power_of_two_compares_a_conversations_own_worker_too() -> None:
    views = [WorkerView(str(number)) for number in range(50)]
    policy = BestOfTwo(random.Random(1))
    assert {_pick(policy, _of("30"), views) for _ in range(50)} == {"30"}
    views[30].in_flight = AFFINITY_SLACK + 1
    assert "30" not in {_pick(policy, _of("30"), views) for _ in range(50)}


@pytest.mark.parametrize("name", PolicyName)
def test_every_name_makes_a_policy_of_its_own(name: PolicyName) -> None:
    prefixes = Prefixes()
    policy = make_policy(name, prefixes)
    assert make_policy(name, prefixes) is not policy
    only = WorkerView("a")
    assert policy.pick(NEW, [only]) is only
    assert policy.pick(NEW, []) is None


def test_kv_aware_is_not_made_without_an_index() -> None:
    with pytest.raises(ValueError, match="needs a prefix index"):
        make_policy(PolicyName.KV_AWARE)
