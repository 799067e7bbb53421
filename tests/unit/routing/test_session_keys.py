"""Where a session key sends requests."""

from __future__ import annotations

from collections import Counter

import pytest

from millstream_server.routing.candidates import SessionRing
from millstream_server.routing.kv_aware import make_policy
from millstream_server.routing.plan import RoutingRequest
from millstream_server.routing.policy import AFFINITY_SLACK, PolicyName
from millstream_server.routing.prefix.prefixes import Prefixes
from millstream_server.routing.router import Router
from millstream_server.routing.workers import WorkerView
from tests.support.processor.views import view

KEYS = [f"user-{number}" for number in range(2000)]


def _router(workers: list[WorkerView], name: PolicyName = PolicyName.LEAST_LOADED) -> Router:
    prefixes = Prefixes()
    router = Router(lambda: make_policy(name, prefixes), prefixes=prefixes)
    for worker in workers:
        router.add(worker)
    return router


def _place(router: Router, key: str) -> str:
    plan = router.plan(RoutingRequest(model="m", token_ids=[1, 2], session_key=key))
    return plan.places[0]


@pytest.mark.parametrize("name", PolicyName)
def test_each_policy_keeps_a_key_at_one_place_and_spreads_keys(name: PolicyName) -> None:
    router = _router([view(f"w{n}:1") for n in range(8)], name)
    found = {key: _place(router, key) for key in KEYS[:400]}
    another = _router([view(f"w{n}:1") for n in reversed(range(8))], name)
    assert {key: _place(another, key) for key in found} == found, "every Processor agrees"
    assert len(Counter(found.values())) == 8


def test_only_the_keys_of_a_place_that_comes_or_goes_move() -> None:
    workers = [view(f"w{n}:1") for n in range(10)]
    full, less = SessionRing(workers), SessionRing(workers[1:])
    before = {key: next(full.places(key)) for key in KEYS}
    after = {key: next(less.places(key)) for key in KEYS}
    moved = [key for key in KEYS if before[key] is not after[key]]
    assert moved
    assert all(before[key] is workers[0] for key in moved)
    shares = Counter(place.address for place in before.values()).values()
    assert max(shares) < 2 * len(KEYS) / 10


def test_a_key_leaves_a_place_that_is_clearly_busier_always_for_the_same_one() -> None:
    workers = [view(f"w{n}:1", dp_size=2) for n in range(4)]
    router = _router(workers)
    home = _place(router, "me")
    places = {place.name: place for worker in workers for place in worker.ranks}
    places[home].in_flight = AFFINITY_SLACK
    assert _place(router, "me") == home
    places[home].in_flight += 1
    other = _place(router, "me")
    assert other != home
    assert {_place(router, "me") for _ in range(20)} == {other}
    places[home].in_flight = 0
    assert _place(router, "me") == home
