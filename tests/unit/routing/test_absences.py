"""What a request without a worker is told, and when it should come back."""

from __future__ import annotations

import itertools

import pytest

from millstream_server.control.engine import Role
from millstream_server.routing.candidates import Absences
from millstream_server.routing.kv_aware import make_policy
from millstream_server.routing.model_workers import workers_of
from millstream_server.routing.plan import RoutingRequest
from millstream_server.routing.policy import PolicyName
from millstream_server.routing.router import Router
from millstream_server.routing.workers import WorkerView
from millstream_server.runtime.errors import NoWorkerError
from tests.support.processor.views import view


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.mark.parametrize("away_s", [0.3, 5.0, 70.0, 900.0])
def test_who_keeps_to_the_delays_comes_back_soon_after_the_worker(away_s: float) -> None:
    clock = Clock()
    absences = Absences(clock)
    absences.changed({("m", Role.DECODE)})
    clock.now_s += 1000
    absences.changed(set())
    left_s = clock.now_s
    for attempts in itertools.count(1):  # noqa: B007
        if clock.now_s - left_s >= away_s:
            break
        refused = absences.error("m", Role.DECODE)
        assert refused.retry_delay_s is not None
        assert 1.0 <= refused.retry_delay_s <= 18.0
        clock.now_s += refused.retry_delay_s
    late_s = clock.now_s - left_s - away_s
    assert late_s <= max(1.0, min(1.2 * away_s, 18.0))
    # Every 12 s at least, beside those of the first seconds: not one each second.
    assert attempts <= 7 + away_s / 12


def test_the_sentence_says_whether_there_was_a_worker() -> None:
    clock = Clock()
    absences = Absences(clock)
    clock.now_s += 20
    never = absences.error("m", Role.DECODE)
    assert never.message == (
        "no decode worker for this model is connected: none has been since this server started "
        "20 s ago; retry later"
    )
    assert never.retry_delay_s is not None
    assert 12.0 <= never.retry_delay_s <= 18.0
    absences.changed({("m", Role.DECODE), ("n", Role.DECODE)})
    absences.changed({("n", Role.DECODE)})
    clock.now_s += 2
    left = absences.error("m", Role.DECODE)
    assert left.message == (
        "no decode worker for this model is connected: the last one left 2 s ago, and may be "
        "starting again; retry later"
    )
    assert left.retry_delay_s is not None
    assert 1.6 <= left.retry_delay_s <= 2.4
    other = absences.error("n", Role.DECODE)
    assert other.message == "no decode worker for this model is connected; retry in a moment"
    assert other.retry_delay_s == 1.0


@pytest.mark.parametrize(
    ("left", "there", "named"),
    [
        ([Role.DECODE], [Role.PREFILL], "no decode worker"),
        ([Role.PREFILL], [Role.DECODE], "no prefill worker"),
        ([Role.DECODE, Role.PREFILL], [], "no prefill worker"),
        ([Role.AGGREGATED], [], "no aggregated worker"),
        ([], [], "no decode worker"),
    ],
)
def test_the_role_that_left_last_is_named(left: list[Role], there: list[Role], named: str) -> None:
    clock = Clock()
    absences = Absences(clock)
    serving = {("m", role) for role in left + there}
    for role in left:
        absences.changed(serving)
        clock.now_s += 1
        serving = serving - {("m", role)}
    absences.changed(serving)
    views: list[WorkerView] = [view(f"{role.value}:1", role) for role in there]
    policies = {role: make_policy(PolicyName.LEAST_LOADED) for role in Role}
    workers = workers_of("m", views, policies, handoff=True, absences=absences)
    with pytest.raises(NoWorkerError, match=named):
        workers.require()


def test_a_router_knows_which_workers_it_had() -> None:
    router = Router(lambda: make_policy(PolicyName.LEAST_LOADED))
    decode = view("d:1", Role.DECODE)
    router.add(view("p:1", Role.PREFILL))
    router.add(decode)
    router.require("m")
    router.remove(decode)
    with pytest.raises(NoWorkerError, match=r"no decode worker .* the last one left 0 s ago"):
        router.plan(RoutingRequest(model="m"))
