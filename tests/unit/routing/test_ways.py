"""Which workers can run a request together: weight versions, adapters; and when to hand off."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest

from millstream_server.control.engine import Role
from millstream_server.control.operations import LoraAdapter
from millstream_server.kv_cache.events import BlocksStored
from millstream_server.kv_cache.hashing import block_hashes
from millstream_server.routing.kv_aware import make_policy
from millstream_server.routing.plan import Handoff, HandoffMode, RoutingRequest
from millstream_server.routing.policy import PolicyName
from millstream_server.routing.prefix.prefixes import Prefixes
from millstream_server.routing.router import Router
from millstream_server.routing.workers import WorkerView
from millstream_server.runtime.errors import (
    AdapterNotFoundError,
    NoWorkerError,
    UnsupportedFeatureError,
)
from tests.support.processor.views import view

REQUEST = RoutingRequest(model="m")


def _router(*workers: WorkerView, decider: Handoff | None = None) -> Router:
    prefixes = Prefixes()
    router = Router(
        lambda: make_policy(PolicyName.LEAST_LOADED), decider, prefixes if decider else None
    )
    for worker in workers:
        router.add(worker)
    return router


def _adapted(address: str, *names: str, role: Role = Role.AGGREGATED) -> WorkerView:
    adapters = tuple(LoraAdapter(name=name, path=None) for name in names)
    return view(address, role, adapters=adapters, takes_adapters=True)


def _prefill(address: str, version: str) -> WorkerView:
    return view(address, Role.PREFILL, weight_version=version)


def _decode(address: str, version: str) -> WorkerView:
    return view(address, Role.DECODE, weight_version=version)


def test_a_prefill_worker_is_paired_with_decode_workers_of_its_weight_version() -> None:
    router = _router(
        *(_prefill("p:1", "1"), _prefill("q:1", "2"), _prefill("r:1", "3")),
        *(_decode("d:1", "1"), _decode("e:1", "2"), _decode("f:1", "4")),
    )
    pairs = {router.plan(REQUEST).places for _ in range(20)}
    assert pairs == {("p:1", "d:1"), ("q:1", "e:1")}
    assert router.capacity("m") == 8, "nothing can run on f"


def test_without_a_pair_aggregated_workers_run_requests_or_the_error_says_why() -> None:
    router = _router(_prefill("p:1", "1"), _decode("d:1", "2"))
    assert router.capacity("m") == 0
    with pytest.raises(NoWorkerError, match="different weight versions"):
        router.plan(REQUEST)
    router.add(view("a:1", weight_version="2"))
    assert router.plan(REQUEST).places == ("a:1",)


def test_requests_with_an_adapter_go_only_where_it_is_loaded() -> None:
    router = _router(_adapted("a:1"), _adapted("b:1", "x"), _adapted("c:1", "x", "y"))
    with_x = {router.plan(RoutingRequest(model="m", adapter="x")).places for _ in range(9)}
    assert with_x == {("b:1",), ("c:1",)}
    assert router.plan(RoutingRequest(model="m", adapter="y")).places == ("c:1",)
    assert len({router.plan(REQUEST).places for _ in range(9)}) == 3
    with pytest.raises(AdapterNotFoundError, match="'z' isn't loaded; loaded now: 'x', 'y'"):
        router.plan(RoutingRequest(model="m", adapter="z"))
    with pytest.raises(UnsupportedFeatureError, match="take no LoRA adapters"):
        _router(view("a:1")).plan(RoutingRequest(model="m", adapter="x"))


@pytest.mark.parametrize("role", [Role.AGGREGATED, Role.PREFILL])
def test_an_adapter_is_not_unknown_while_its_workers_are_out_of_service(role: Role) -> None:
    having = _adapted("b:1", "x", role=role)
    others = [_adapted("a:1", role=role)]
    if role is Role.PREFILL:
        others.append(_adapted("d:1", "x", role=Role.DECODE))
    router = _router(*others, having)
    having.description = None
    router.changed()
    with pytest.raises(NoWorkerError, match="have the LoRA adapter x accept no requests now"):
        router.plan(RoutingRequest(model="m", adapter="x"))
    router.remove(having)
    with pytest.raises(AdapterNotFoundError):
        router.plan(RoutingRequest(model="m", adapter="x"))


def test_both_workers_of_a_hand_off_have_the_adapter() -> None:
    workers = [
        *(_adapted("p:1", role=Role.PREFILL), _adapted("q:1", "x", "y", role=Role.PREFILL)),
        *(_adapted("d:1", "y", role=Role.DECODE), _adapted("e:1", "x", role=Role.DECODE)),
    ]
    router = _router(*workers)
    for _ in range(4):
        assert router.plan(RoutingRequest(model="m", adapter="x")).places == ("q:1", "e:1")
        assert router.plan(RoutingRequest(model="m", adapter="y")).places == ("q:1", "d:1")
    router.remove(workers[-1])
    with pytest.raises(AdapterNotFoundError):
        router.plan(RoutingRequest(model="m", adapter="x"))


def _mixed(mode: HandoffMode) -> tuple[Router, list[WorkerView]]:
    roles = {"p:1": Role.PREFILL, "d:1": Role.DECODE, "a:1": Role.AGGREGATED}
    workers = [view(address, role, block_size=4, tells_kv=True) for address, role in roles.items()]
    return _router(*workers, decider=Handoff(mode, 100)), workers


_FRESH = itertools.count(9000, 9000)


def _hands_off(router: Router, tokens: int, known: Sequence[int] = ()) -> bool:
    """Route a prompt: ``known`` and then so many tokens that no prompt had before."""
    first = next(_FRESH)
    prompt = [*known, *range(first, first + tokens)]
    return len(router.plan(RoutingRequest(model="m", token_ids=prompt)).legs) > 1


def test_auto_hands_off_prompts_that_would_take_an_aggregated_worker_long() -> None:
    router, (_, _, aggregated) = _mixed(HandoffMode.AUTO)
    assert [_hands_off(router, tokens) for tokens in (99, 100)] == [False, True]
    assert router.prefixes
    known = range(1000)
    hashes = block_hashes(known, 4)
    router.prefixes.of("m").index.apply(aggregated.member, [BlocksStored(hashes)])
    assert [_hands_off(router, tokens, known) for tokens in (99, 100)] == [False, True]
    always, never = _mixed(HandoffMode.ALWAYS)[0], _mixed(HandoffMode.NEVER)[0]
    assert [_hands_off(always, 1), _hands_off(never, 9999)] == [True, False]


@pytest.mark.parametrize("full", [0, 1], ids=["prefill", "decode"])
def test_auto_goes_the_other_way_while_all_workers_of_one_are_full(full: int) -> None:
    router, workers = _mixed(HandoffMode.AUTO)
    workers[full].in_flight = 4
    assert not _hands_off(router, 500)
    workers[full].in_flight = 3
    assert _hands_off(router, 500)
    workers[2].in_flight = 4
    assert _hands_off(router, 5)
    workers[2].in_flight = 3
    assert not _hands_off(router, 5)
