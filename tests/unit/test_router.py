"""What a router knows of a model's workers, and the plans it makes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from millstream_server.control.engine import EngineInfo, Role, WorkerDescription
from millstream_server.control.operations import LoraAdapter
from millstream_server.generation.sampling import Ability
from millstream_server.generation.ticket import KvTransfer
from millstream_server.routing.kv_aware import make_policy
from millstream_server.routing.pairs import shared_transfer
from millstream_server.routing.plan import Handoff, HandoffMode, Plan, RoutingRequest, weights_of
from millstream_server.routing.policy import PolicyName
from millstream_server.routing.router import Router
from millstream_server.routing.workers import WorkerView
from millstream_server.runtime.errors import NoWorkerError
from tests.support.processor.views import view

REQUEST = RoutingRequest(model="m")


def _router(*views: WorkerView, handoff: Handoff | None = None) -> Router:
    router = Router(lambda: make_policy(PolicyName.LEAST_LOADED), handoff)
    for one in views:
        router.add(one)
    return router


def _lose(router: Router, *views: WorkerView) -> None:
    for one in views:
        one.description = None
    router.changed()


def _roles(plan: Plan) -> Sequence[Role]:
    return [leg.role for leg in plan.legs]


# ---- capacity


def test_a_request_that_was_cancelled_on_a_wedged_worker_is_no_capacity() -> None:
    """Its place is given back, so what it still fills there would let one more run elsewhere."""
    one, two = view("a:1"), view("b:1")
    router = _router(one, two)
    assert router.capacity("m") == 8
    two.in_flight = two.in_use = 3
    _lose(router, two)
    assert router.capacity("m") == 4 + 3
    two.in_use = 1
    assert router.capacity("m") == 4 + 1


def test_capacity_is_that_of_the_workers_tokens_come_from() -> None:
    prefill, decode = view("p:1", Role.PREFILL), view("d:1", Role.DECODE, max_running_requests=7)
    router = _router(prefill, decode, view("a:1"))
    assert router.capacity("m") == 7
    prefill.in_use = 2
    _lose(router, prefill)
    assert router.capacity("m") == 4, "aggregated workers take over; prefill holds no place"
    decode.in_use = 3
    _lose(router, decode)
    assert router.capacity("m") == 4 + 3


def test_items_open_on_an_encode_worker_that_leaves_are_no_capacity() -> None:
    encode = view("e:1", Role.ENCODE)
    router = _router(view("a:1"), encode)
    encode.in_use = 3
    _lose(router, encode)
    assert router.capacity("m") == 4


def test_without_a_needed_role_there_is_no_capacity_whatever_still_runs() -> None:
    prefill, decode = view("p:1", Role.PREFILL), view("d:1", Role.DECODE)
    router = _router(prefill, decode)
    decode.in_use = 2
    _lose(router, decode)
    assert not router.ready("m")
    assert router.capacity("m") == 0
    router.remove(decode)
    assert router.capacity("m") == 0
    assert router.connected("m") == {Role.PREFILL: 1}


def test_a_worker_counts_for_its_own_model_alone() -> None:
    router = _router(view("a:1"), view("b:1", model="other"))
    assert router.connected("m") == {Role.AGGREGATED: 1}
    assert router.connected("other") == {Role.AGGREGATED: 1}
    assert not router.ready("third")
    assert router.of("third").limits is None


def test_diffusion_workers_that_generate_run_whole_requests() -> None:
    router = _router(view("a:1", Role.DIFFUSION), view("b:1", Role.DIFFUSION))
    assert router.connected("m") == {Role.DIFFUSION: 2}
    assert router.runs_in("m", Role.DIFFUSION)
    assert not router.runs_in("m", Role.AGGREGATED)
    assert router.capacity("m") == 8
    plan = router.plan(REQUEST)
    assert _roles(plan) == [Role.DIFFUSION]
    assert plan.places == ("a:1",)


def test_diffusion_workers_that_make_images_run_no_text() -> None:
    images = EngineInfo(engine="e", engine_version="1", max_running_requests=4)
    what = WorkerDescription(role=Role.DIFFUSION, model="m", engine=images)
    painter = WorkerView("a:1", what, what, in_use=1)
    router = _router(painter)
    assert not router.ready("m")
    assert router.of("m").limits is None
    router.add(view("b:1", Role.DIFFUSION))
    _lose(router, painter)
    assert router.capacity("m") == 4


def test_what_one_of_the_workers_would_ignore_is_refused() -> None:
    router = _router(
        view("a:1", Role.DIFFUSION, refused_fields=frozenset({"logprobs"})),
        view("b:1", Role.DIFFUSION, refused_fields=frozenset({"sampling.seed"})),
    )
    limits = router.of("m").limits
    assert limits is not None
    assert limits.refused_fields == {"logprobs", "sampling.seed"}


# ---- plans


def test_prefill_and_decode_workers_share_a_request() -> None:
    router = _router(view("p:1", Role.PREFILL), view("d:1", Role.DECODE), view("a:1"))
    plan = router.plan(REQUEST)
    assert _roles(plan) == [Role.PREFILL, Role.DECODE]
    assert plan.places == ("p:1", "d:1")
    assert plan.transfer is None


NIXL, PUSH = KvTransfer("sglang.nixl"), KvTransfer("vllm.push", b"at")
PULL = KvTransfer("vllm.pull", prefill_first=True)


def _pair(prefill: KvTransfer | None, decode: KvTransfer | None, *engines: str) -> Router:
    first, second = engines or ("simulated", "simulated")
    return _router(
        view("p:1", Role.PREFILL, engine=first, kv_transfer=prefill),
        view("d:1", Role.DECODE, engine=second, kv_transfer=decode),
    )


def test_a_plan_has_the_prefill_workers_way_of_handing_off() -> None:
    for way in (NIXL, PUSH, PULL):
        assert _pair(way, replace(way, data=b"")).plan(REQUEST).transfer == way


def test_pairs_are_of_one_kind() -> None:
    ways = {"a": NIXL, "b": KvTransfer("sglang.mooncake"), "c": PUSH, "d": PULL}
    router = _router(
        *(view(f"{at}:1", Role.PREFILL, kv_transfer=way) for at, way in ways.items()),
        *(
            view(f"{at}:{n}", Role.DECODE, kv_transfer=replace(way, data=b""))
            for at, way in ways.items()
            for n in (2, 3)
        ),
    )
    plans = [router.plan(REQUEST) for _ in range(200)]
    assert {prefill.split(":")[0] for prefill, _ in (plan.places for plan in plans)} == set("abcd")
    for plan in plans:
        prefill, decode = plan.places
        assert prefill.split(":")[0] == decode.split(":")[0]
        assert plan.transfer == ways[prefill.split(":")[0]]


def test_workers_that_fit_no_other_get_no_requests() -> None:
    router = _pair(NIXL, NIXL)
    router.add(view("p:2", Role.PREFILL, kv_transfer=PUSH))
    router.add(view("d:2", Role.DECODE, kv_transfer=PULL))
    assert {router.plan(REQUEST).places for _ in range(20)} == {("p:1", "d:1")}
    assert router.capacity("m") == 4


@pytest.mark.parametrize(("prefill", "decode"), [(None, NIXL), (NIXL, None), (None, None)])
def test_a_worker_before_kinds_fits_those_of_its_engine(
    prefill: KvTransfer | None, decode: KvTransfer | None
) -> None:
    """Version 0.1.0 knows tickets without engine data alone."""
    plan = _pair(prefill, decode).plan(REQUEST)
    assert plan.places == ("p:1", "d:1")
    assert plan.transfer is None
    with pytest.raises(NoWorkerError, match="different ways of KV transfer"):
        _pair(prefill, decode, "vllm", "sglang").plan(REQUEST)


def test_old_and_new_workers_of_an_engine_mix() -> None:
    router = _pair(None, None)
    router.add(view("p:2", Role.PREFILL, kv_transfer=NIXL))
    router.add(view("d:2", Role.DECODE, kv_transfer=NIXL))
    router.add(view("d:3", Role.DECODE, kv_transfer=PULL))
    workers = router.of("m")
    pairs = {
        (prompt.name, tokens.name): shared_transfer(prompt, tokens)
        for prompt in workers.prefill.places
        for tokens in workers.decode_for(prompt).places
    }
    assert pairs == {
        ("p:1", "d:1"): None,
        ("p:1", "d:2"): None,
        ("p:2", "d:1"): None,
        ("p:2", "d:2"): NIXL,
    }


@pytest.mark.parametrize(("prefill", "decode"), [(PUSH, None), (PULL, None), (None, PULL)])
def test_what_needs_engine_data_fits_no_worker_before_kinds(
    prefill: KvTransfer | None, decode: KvTransfer | None
) -> None:
    with pytest.raises(NoWorkerError, match="different ways of KV transfer"):
        _pair(prefill, decode).plan(REQUEST)


def test_the_error_names_kinds_only_if_versions_agree() -> None:
    router = _pair(NIXL, PUSH, "sglang", "vllm")
    assert not router.ready("m")
    assert not router.of("m").versions_differ
    with pytest.raises(NoWorkerError) as refused:
        router.require("m")
    assert refused.value.message == (
        "this model's prefill and decode workers have different ways of KV transfer "
        "('sglang.nixl' against 'vllm.push'); start both with the same"
    )
    router = _router(
        view("p:1", Role.PREFILL, kv_transfer=NIXL, weight_version="1"),
        view("d:1", Role.DECODE, kv_transfer=PUSH, weight_version="2"),
    )
    assert router.of("m").versions_differ
    with pytest.raises(NoWorkerError, match=r"different weight versions \('1' against '2'\)"):
        router.require("m")


def test_a_conversation_stays_with_both_its_workers() -> None:
    prefills = [view(f"p:{n}", Role.PREFILL) for n in range(3)]
    decodes = [view(f"d:{n}", Role.DECODE) for n in range(3)]
    router = _router(*prefills, *decodes)
    first = router.plan(REQUEST)
    follow_up = RoutingRequest(model="m", session=first.places)
    assert {router.plan(follow_up).places for _ in range(9)} == {first.places}
    assert len({router.plan(REQUEST).places for _ in range(9)}) > 1


def test_never_handing_off_takes_the_aggregated_workers() -> None:
    never = Handoff(HandoffMode.NEVER)
    router = _router(
        view("p:1", Role.PREFILL), view("d:1", Role.DECODE), view("a:1"), handoff=never
    )
    assert _roles(router.plan(REQUEST)) == [Role.AGGREGATED]
    assert router.capacity("m") == 4
    only = _router(view("p:1", Role.PREFILL), view("d:1", Role.DECODE), handoff=never)
    assert _roles(only.plan(REQUEST)) == [Role.PREFILL, Role.DECODE], "there is no other way"


def test_handing_off_can_be_decided_for_each_request() -> None:
    prefill, decode = view("p:1", Role.PREFILL), view("d:1", Role.DECODE)
    router = _router(prefill, decode, view("a:1"), handoff=Handoff(HandoffMode.AUTO, 4))
    short, long = (RoutingRequest(model="m", token_ids=range(n)) for n in (3, 4))
    assert _roles(router.plan(short)) == [Role.AGGREGATED]
    assert _roles(router.plan(long)) == [Role.PREFILL, Role.DECODE]
    assert router.capacity("m") == 8


def test_a_missing_role_is_named() -> None:
    router = _router(view("p:1", Role.PREFILL))
    with pytest.raises(NoWorkerError, match=r"no decode worker .* is connected") as refused:
        router.plan(REQUEST)
    assert refused.value.retry_delay_s == 1.0
    router = _router(view("d:1", Role.DECODE))
    with pytest.raises(NoWorkerError, match="no prefill worker"):
        router.require("m")
    router.add(view("p:1", Role.PREFILL))
    router.require("m")


def test_plans_follow_workers_that_come_and_go() -> None:
    a, b = view("a:1"), view("b:1")
    router = _router(a)
    told: list[bool] = []
    router.watch(lambda: told.append(router.ready("m")))
    assert router.plan(REQUEST).places == ("a:1",)
    router.add(b)
    _lose(router, a)
    assert router.plan(REQUEST).places == ("b:1",)
    router.remove(b)
    assert told == [True, True, False]
    a.description = a.last_description
    router.changed()
    assert router.plan(REQUEST).places == ("a:1",)


# ---- limits


def test_limits_are_the_least_that_all_workers_can() -> None:
    seed, bias, prompts = Ability.SEED, Ability.LOGIT_BIAS, Ability.PROMPT_LOGPROBS
    router = _router(
        view("p:1", Role.PREFILL, context_length=5, abilities=frozenset({prompts})),
        view("d:1", Role.DECODE, context_length=9, abilities=frozenset({seed, bias})),
        view("d:2", Role.DECODE, context_length=8, abilities=frozenset({bias})),
    )
    limits = router.of("m").limits
    assert limits
    assert limits.context_length == 5
    assert limits.abilities == {bias, prompts}


# ---- adapters


def test_an_adapter_can_be_named_if_one_worker_or_one_of_both_roles_has_it() -> None:
    one, two, three = LoraAdapter("one"), LoraAdapter("two"), LoraAdapter("three")
    router = _router(
        view("a:1", Role.PREFILL, takes_adapters=True, adapters=(one, two)),
        view("b:1", Role.DECODE, takes_adapters=True, adapters=(two,)),
        view("c:1", Role.AGGREGATED, takes_adapters=True, adapters=(three,)),
    )
    limits = router.of("m").limits
    assert limits is not None
    assert limits.takes_adapters
    assert [adapter.name for adapter in limits.adapters] == ["three", "two"]


# ---- a request that goes on


def test_a_request_goes_on_with_the_same_weights_and_adapter_and_elsewhere() -> None:
    one = LoraAdapter("one")
    like: dict[str, Any] = {"weight_version": "2", "model_hash": "h"}
    lost = view("a:1", **like)
    router = _router(
        lost,
        view("b:1", weight_version="1", model_hash="h"),
        view("c:1", weight_version="2", model_hash="other"),
        view("d:1", engine="another", **like),
    )
    goes_on = replace(REQUEST, weights=weights_of(lost), avoid=("a:1",))
    with pytest.raises(NoWorkerError):
        router.plan(goes_on)
    router.add(view("e:1", **like))
    assert {router.plan(goes_on).places for _ in range(3)} == {("e:1",)}
    router.add(view("f:1", takes_adapters=True, adapters=(one,), **like))
    adapted = replace(goes_on, adapter="one")
    assert {router.plan(adapted).places for _ in range(3)} == {("f:1",)}
    with pytest.raises(NoWorkerError):
        router.plan(replace(goes_on, resumes=True))
    router.add(view("g:1", abilities=frozenset({Ability.RESUMED_OUTPUT}), **like))
    assert router.plan(replace(goes_on, resumes=True)).places == ("g:1",)
    _lose(router, lost)
    assert weights_of(lost) == ("2", "h", "simulated"), "as long as it is known"
