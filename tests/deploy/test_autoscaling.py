"""A scaler sets replicas by what is emitted, no faster than workers drain, as their one owner."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.deploy.deploy_tools import (
    APIS,
    CHART,
    NAMESPACE,
    RELEASE,
    Helm,
    Manifest,
    RenderError,
    merged,
    objects,
)
from tests.support.deploy.fake_api import render_on
from tests.support.deploy.promql import analyse

Render = Callable[..., list[Manifest]]
KEDA = {"autoscaling": {"kind": "keda"}}
HPA = {"autoscaling": {"kind": "hpa"}}
PROMETHEUS = {"monitoring": {"prometheus": {"url": "http://prometheus.monitoring:9090"}}}
VALUES: dict[str, Any] = {
    "models": {
        "chat": {"uri": "pvc://claim/chat", "servedName": "chat-7b"},
        "pictures": {"uri": "pvc://claim/pictures"},
        "vectors": {"uri": "pvc://claim/vectors"},
    },
    "encode": {"enabled": True, "pools": {"main": {"model": "chat"}}},
    "prefill": {"enabled": True, "pools": {"main": {"model": "chat"}}},
    "decode": {
        "enabled": True,
        "pools": {
            "wide": {"model": "chat", "parallelism": {"tensor": 16, "nodes": 2}},
            "small": {"model": "chat"},
        },
    },
    "diffusion": {"enabled": True, "pools": {"main": {"model": "pictures"}}},
    "embedding": {"enabled": True, "pools": {"main": {"model": "vectors"}}},
    **PROMETHEUS,
}
EVERY_POOL_BY_KEDA = merged(VALUES, {"poolDefaults": KEDA})


def test_every_query_reads_what_is_emitted(render: Render) -> None:
    scaled = objects(render(values=EVERY_POOL_BY_KEDA), "ScaledObject")
    assert len(scaled) == 7
    triggers = [trigger for one in scaled for trigger in one["spec"]["triggers"]]
    assert {trigger["type"] for trigger in triggers} == {"prometheus"}
    queries = [trigger["metadata"]["query"] for trigger in triggers]
    for query, expression in zip(queries, analyse(queries), strict=True):
        assert not expression.labels, f"more than one series: {query}"
        assert f'namespace="{NAMESPACE}", job="{RELEASE}-millstream"' in query
        assert "${" not in query
        assert "or vector(0)" in query, f"nothing measured must be 0: {query}"
        # Metrics have the name that clients use, which isn't always the key in `models`.
        assert not re.search(r'model="chat"', query)


def test_what_waits_is_divided_among_the_pools_of_a_model(render: Render) -> None:
    shares = {
        one["metadata"]["name"].removeprefix(f"{RELEASE}-millstream-"): re.findall(
            r"queued_requests\{[^}]*\}\) or vector\(0\)\) / (\d)", trigger["metadata"]["query"]
        )
        for one in objects(render(values=EVERY_POOL_BY_KEDA), "ScaledObject")
        for trigger in one["spec"]["triggers"]
        if trigger["name"] == "waitingRequests"
    }
    assert shares == {
        "prefill-main": ["1"],
        "decode-wide": ["2"],
        "decode-small": ["2"],
        "embedding-main": ["1"],
    }


@pytest.mark.parametrize("kind", ["keda", "hpa"])
def test_scalers_own_the_replicas_of_existing_workloads(kind: str, render: Render) -> None:
    manifests = render(values=merged(VALUES, {"poolDefaults": {"autoscaling": {"kind": kind}}}))
    scaled = objects(manifests, "ScaledObject" if kind == "keda" else "HorizontalPodAutoscaler")
    workloads = {
        (one["apiVersion"], one["kind"], one["metadata"]["name"]): one["spec"]
        for one in manifests
        if one["kind"] in {"Deployment", "LeaderWorkerSet"}
    }
    targets = [one["spec"]["scaleTargetRef"] for one in scaled]
    named = {(one["apiVersion"], one["kind"], one["name"]) for one in targets}
    assert named == set(workloads)
    # Without a cluster to look at nothing is known about them, so they are left alone.
    assert not [name for name, spec in workloads.items() if "replicas" in spec]


@pytest.mark.parametrize("kind", ["keda", "hpa"])
@pytest.mark.parametrize("name", ["helm3", "helm4"])
def test_replicas_stay_what_they_are(
    name: str, kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """When scaling is switched on, and at each upgrade after that."""
    helm: Helm = request.getfixturevalue(name)
    values = merged(VALUES, {"poolDefaults": {"autoscaling": {"kind": kind, "minReplicas": 3}}})
    known = helm.template(values=values)
    live = {f"{RELEASE}-millstream-processor": 5, f"{RELEASE}-millstream-decode-wide": 4}
    there = [
        merged(one, {"spec": {"replicas": live[one["metadata"]["name"]]}})
        for one in known
        if one["metadata"]["name"] in live and one["kind"] in {"Deployment", "LeaderWorkerSet"}
    ]
    assert len(there) == 2
    for objects_there, expected in ((there, live), ([], {})):
        rendered = render_on(helm, known, objects_there, tmp_path, values=values)
        replicas = {
            one["metadata"]["name"]: one["spec"]["replicas"]
            for one in rendered
            if one["kind"] in {"Deployment", "LeaderWorkerSet"}
        }
        # The Processor's own minimum is 2.
        first = {f"{RELEASE}-millstream-processor": 2}
        assert replicas == dict.fromkeys(replicas, 3) | first | expected


@pytest.mark.parametrize("name", ["helm3", "helm4"])
def test_null_takes_replicas_away(name: str, request: pytest.FixtureRequest) -> None:
    """Of another values file, so that a scaler may own them."""
    helm: Helm = request.getfixturevalue(name)
    nothing: dict[str, Any] = {"replicas": None}
    values = merged(
        VALUES,
        {
            "processor": {**nothing, **HPA},
            "decode": {"replicas": 3, "pools": {"small": {**nothing, **HPA}}},
        },
    )
    rendered = helm.template(values=values)
    scaled = {one["metadata"]["name"] for one in objects(rendered, "HorizontalPodAutoscaler")}
    assert scaled == {f"{RELEASE}-millstream-{pool}" for pool in ("processor", "decode-small")}
    wide = next(one for one in rendered if one["kind"] == "LeaderWorkerSet")
    assert wide["spec"]["replicas"] == 3
    unscaled = merged(values, {"decode": {"pools": {"small": {"autoscaling": {"kind": "none"}}}}})
    (small,) = (
        one
        for one in objects(helm.template(values=unscaled), "Deployment")
        if one["metadata"]["name"].endswith("decode-small")
    )
    assert small["spec"]["replicas"] == 1, "as poolDefaults say"


def _grace(workload: Manifest) -> int:
    spec = workload["spec"]
    template = spec.get("template") or spec["leaderWorkerTemplate"]["workerTemplate"]
    grace: int = template["spec"]["terminationGracePeriodSeconds"]
    return grace


@pytest.mark.parametrize("kind", ["keda", "hpa"])
def test_a_replica_goes_when_the_one_before_may_have_drained(kind: str, render: Render) -> None:
    changes = {"autoscaling": {"kind": kind}, "drain": {"limitSeconds": 900}}
    manifests = render(
        values=merged(
            VALUES, {"poolDefaults": changes, "diffusion": {"drain": {"limitSeconds": 7200}}}
        )
    )
    workloads = {
        one["metadata"]["name"]: one
        for one in manifests
        if one["kind"] in {"Deployment", "LeaderWorkerSet"}
    }
    for one in manifests:
        if one["kind"] == "ScaledObject":
            behavior = one["spec"]["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
        elif one["kind"] == "HorizontalPodAutoscaler":
            behavior = one["spec"]["behavior"]
        else:
            continue
        (policy,) = behavior["scaleDown"]["policies"]
        grace = _grace(workloads.pop(one["metadata"]["name"]))
        # Kubernetes takes half an hour at most.
        assert policy == {"type": "Pods", "value": 1, "periodSeconds": min(grace, 1800)}
        assert behavior["scaleDown"]["stabilizationWindowSeconds"] == 600
    assert workloads == {}


def test_the_values_have_a_target_for_each_query_and_no_other() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    queries = yaml.safe_load((CHART / "rules" / "scalers.yaml").read_text(encoding="utf-8"))
    for role, named in queries.items():
        assert set(values[role]["autoscaling"]["targets"]) == set(named), role


def test_a_target_of_0_is_not_asked_for(render: Render) -> None:
    change = {"decode": {"pools": {"small": {"autoscaling": {"targets": {"kvCache": 0}}}}}}
    asked = {
        one["metadata"]["name"]: {trigger["name"] for trigger in one["spec"]["triggers"]}
        for one in objects(render(values=merged(EVERY_POOL_BY_KEDA, change)), "ScaledObject")
    }
    assert asked[f"{RELEASE}-millstream-decode-small"] == {"waitingRequests"}
    assert asked[f"{RELEASE}-millstream-decode-wide"] == {"kvCache", "waitingRequests"}


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        (
            {"decode": {"pools": {"small": {"replicas": 3, **KEDA}}}},
            "decode.pools.small.autoscaling.kind is keda, which are two owners of one number",
        ),
        (
            {"decode": {"replicas": 2, "pools": {"small": HPA}}},
            "decode.pools.small.replicas is 2 and decode.pools.small.autoscaling.kind is hpa",
        ),
        (
            {"processor": {"replicas": 4, **HPA}},
            "processor.replicas is 4 and processor.autoscaling.kind is hpa",
        ),
        (
            {"processor": {"autoscaling": {"kind": "hpa", "minReplicas": 5}}},
            "processor.autoscaling: minReplicas is 5 and maxReplicas is 4",
        ),
        (
            {"processor": {"autoscaling": {"kind": "hpa", "metrics": []}}},
            "processor.autoscaling.kind is hpa and its metrics are empty",
        ),
        (
            {"processor": KEDA, "monitoring": {"prometheus": {"url": ""}}},
            "processor.autoscaling.kind is keda, which asks Prometheus; set monitoring.prometheus",
        ),
        (
            {"encode": {"autoscaling": {"kind": "keda", "targets": {"kvCache": 0.5}}}},
            "targets.kvCache: a pool of role encode has no such target; there are waitingItems",
        ),
        (
            {"encode": {"autoscaling": {"kind": "keda", "targets": {"waitingItems": 0}}}},
            "encode.pools.main.autoscaling.kind is keda and no target is above 0",
        ),
        (
            {"processor": {"autoscaling": {"kind": "keda", "minReplicas": 0}}},
            "minimum: got 0, want 1",
        ),
    ],
)
def test_contradictions_are_refused(values: dict[str, Any], sentence: str, helm4: Helm) -> None:
    with pytest.raises(RenderError, match=re.escape(sentence)):
        helm4.text(values=merged(VALUES, values))


def test_keda_is_refused_where_the_cluster_has_none(helm4: Helm) -> None:
    apis = [api for api in APIS if "keda" not in api]
    with pytest.raises(RenderError, match="the cluster has no ScaledObject; install KEDA"):
        helm4.text(values=EVERY_POOL_BY_KEDA, apis=apis)
