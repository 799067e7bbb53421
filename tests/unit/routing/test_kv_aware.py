"""Which place kv_aware picks, and what it is told of places."""

from __future__ import annotations

from collections import Counter
from typing import Any

from millstream_server.control.engine import EngineLoad, RankLoad, Role
from millstream_server.kv_cache.events import BlocksStored
from millstream_server.kv_cache.hashing import Namespace, block_hashes
from millstream_server.routing.kv_aware import make_policy
from millstream_server.routing.plan import RoutingRequest
from millstream_server.routing.policy import AFFINITY_SLACK, PolicyName
from millstream_server.routing.prefix.prefixes import FULL_TOKENS, REQUEST_TOKENS, Prefixes
from millstream_server.routing.router import Router
from millstream_server.routing.workers import Place, WorkerView
from tests.support.processor import views

LONG = list(range(4000))


def _view(address: str, role: Role = Role.AGGREGATED, **engine: Any) -> WorkerView:
    return views.view(address, role, **{"block_size": 4, "tells_kv": True} | engine)


def _router(*workers: WorkerView, policy: PolicyName = PolicyName.KV_AWARE) -> Router:
    prefixes = Prefixes()
    router = Router(lambda: make_policy(policy, prefixes), prefixes=prefixes)
    for worker in workers:
        router.add(worker)
    router.capacity("m")
    return router


def _store(router: Router, place: Place, token_ids: list[int], **namespace: str) -> None:
    """Tell that a place has cached a prompt."""
    assert router.prefixes
    size = 4
    hashes = block_hashes(token_ids, size, Namespace(**namespace))
    router.prefixes.of("m").index.apply(place.member, [BlocksStored(hashes)])


def _load(place: WorkerView, tokens: int, requests: int = 0) -> None:
    place.pending_tokens, place.in_flight = tokens, requests
    place.on_load(place)


def _route(router: Router, token_ids: list[int], **request: Any) -> tuple[str, int]:
    """Return where a prompt goes, and how much of it is expected to be cached there."""
    leg = router.plan(RoutingRequest(model="m", token_ids=token_ids, **request)).legs[0]
    return leg.place.name, leg.cached_tokens


def test_a_prompt_goes_where_most_of_it_is_cached() -> None:
    a, b, c = (_view(name) for name in ("a:1", "b:1", "c:1"))
    router = _router(a, b, c)
    _store(router, b, LONG[:400])
    _store(router, c, LONG[:800])
    assert _route(router, LONG[:1000]) == ("c:1", 800)
    assert _route(router, LONG[:800]) == ("c:1", 799), "the last token is always computed"


def test_a_holder_is_left_once_more_waits_there_than_is_computed_elsewhere() -> None:
    a, b = _view("a:1"), _view("b:1")
    router = _router(a, b)
    _store(router, b, LONG[:800])
    _load(b, 799)
    assert _route(router, [*LONG[:800], 7]) == ("b:1", 800)
    _load(b, 801)
    assert _route(router, [*LONG[:800], 8]) == ("a:1", 0)
    assert _route(router, [*LONG[:800], 9]) == ("a:1", 800), "the prefix is computed there, too"


def test_other_processors_queues_and_full_places_count_too() -> None:
    a, b = _view("a:1", max_running_requests=8), _view("b:1", max_running_requests=8)
    router = _router(a, b)
    one, two, three = LONG[:800], LONG[1000:1800], LONG[2000:2800]
    for prompt in (one, two, three):
        _store(router, b, prompt)
    rank = RankLoad(
        running_requests=0, queued_requests=1, queued_tokens=900, used_blocks=0, total_blocks=9
    )
    b.report(
        EngineLoad(
            running_requests=0, queued_requests=1, used_blocks=0, total_blocks=9, ranks=(rank,)
        )
    )
    assert _route(router, one) == ("a:1", 0)
    b.report(None)
    _load(b, 0, requests=7)
    assert 7 * REQUEST_TOKENS < 800 < FULL_TOKENS
    assert _route(router, two) == ("b:1", 799)
    _load(b, 0, requests=8)
    assert _route(router, three) == ("a:1", 0)


def test_prompts_with_a_new_prefix_go_together_before_it_is_computed() -> None:
    router = _router(*(_view(f"{name}:1") for name in "abcd"))
    found = {_route(router, [*LONG[:400], number])[0] for number in range(6)}
    assert len(found) == 1
    others = {_route(router, [number] * 400)[0] for number in range(4)}
    assert len(others) == 4, "prompts that share nothing are spread"


def test_adapters_salts_and_media_separate_what_is_cached() -> None:
    a, b = _view("a:1"), _view("b:1")
    router = _router(a, b)
    _store(router, b, LONG[:400], salt="s")
    assert _route(router, LONG[:401], cache_salt="s") == ("b:1", 400)
    assert _route(router, LONG[:401])[1] == 0
    assert _route(router, LONG[:401], cache_salt="s", media_start=42) == ("b:1", 40)


def test_without_events_and_without_prompts_it_goes_by_load() -> None:
    a, b = _view("a:1", tells_kv=False), _view("b:1", tells_kv=False)
    router = _router(a, b)
    a.in_flight = 1
    assert _route(router, LONG) == ("b:1", 0)
    assert _route(router, LONG, session=("a:1",)) == ("a:1", 0)
    router = _router(_view("c:1"), busy := _view("d:1"))
    busy.in_flight = 1
    assert _route(router, []) == ("c:1", 0)


def test_workers_with_other_block_sizes_are_compared_by_tokens() -> None:
    router = _router(_view("a:1"), b := _view("b:1", block_size=2))
    assert router.prefixes
    hashes = block_hashes(LONG[:42], 2)
    router.prefixes.of("m").index.apply(b.member, [BlocksStored(hashes)])
    assert _route(router, LONG[:100]) == ("b:1", 42)


def test_a_worker_that_leaves_or_changes_loses_its_blocks() -> None:
    a, b, c = (_view(name) for name in ("a:1", "b:1", "c:1"))
    router = _router(a, b, c)
    _store(router, b, LONG[:400])
    b.description = None
    router.changed()
    assert _route(router, [*LONG[:400], 1])[1] == 0
    b.description = b.last_description
    router.changed()
    for other in (a, c):  # one of them got the prompt, and is expected to cache it
        _load(other, 9999)
    assert _route(router, [*LONG[:400], 2]) == ("b:1", 400), "it was away for a moment"
    router.remove(b)
    router.add(b)
    router.capacity("m")
    assert router.prefixes
    assert router.prefixes.of("m").index.held(b.member) == set()


def test_prefill_is_chosen_by_prefix_and_decode_by_load() -> None:
    p, q = _view("p:1", Role.PREFILL), _view("q:1", Role.PREFILL)
    d, e = _view("d:1", Role.DECODE), _view("e:1", Role.DECODE)
    router = _router(p, q, d, e)
    _store(router, q, LONG[:400])
    _store(router, d, LONG[:400])
    _load(d, 0, requests=1)
    plan = router.plan(RoutingRequest(model="m", token_ids=LONG[:500]))
    assert plan.places == ("q:1", "e:1")
    assert [leg.cached_tokens for leg in plan.legs] == [400, 0]


def test_ranks_have_caches_and_loads_of_their_own() -> None:
    a = _view("a:1", dp_size=2)
    router = _router(a, _view("b:1", dp_size=2, dp_start=4))
    _store(router, a.ranks[1], LONG[:400])
    plan = router.plan(RoutingRequest(model="m", token_ids=LONG[:500]))
    (leg,) = plan.legs
    assert (leg.place.worker, leg.place.dp_rank, leg.cached_tokens) == (a, 1, 400)
    assert plan.places == ("a:1 rank 1",)
    found = Counter(_route(router, [number] * 400)[0] for number in range(4))
    assert found == {f"{name}:1 rank {rank}": 1 for name, rank in ("a0", "a1", "b4", "b5")}


def test_other_policies_choose_among_ranks_by_their_load() -> None:
    a = _view("a:1", dp_size=3)
    router = _router(a, policy=PolicyName.LEAST_LOADED)
    a.ranks[0].in_flight, a.ranks[2].in_flight = 1, 2
    request = RoutingRequest(model="m")
    assert router.plan(request).legs[0].place.dp_rank == 1
    stays = RoutingRequest(model="m", session=("a:1 rank 2",))
    assert router.plan(stays).legs[0].place.dp_rank == 2
    a.ranks[2].in_flight = AFFINITY_SLACK + 1
    assert router.plan(stays).legs[0].place.dp_rank == 1
