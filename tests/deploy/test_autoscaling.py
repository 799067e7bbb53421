"""A scaler sets replicas by what is emitted, no faster than workers drain, as their one owner."""

from __future__ import annotations

import json
import math
import re
import subprocess
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


def demand_rules(manifests: list[Manifest]) -> list[dict[str, Any]]:
    groups = objects(manifests, "PrometheusRule")[0]["spec"]["groups"]
    return [
        rule for group in groups if group["name"] == "millstream-demand" for rule in group["rules"]
    ]


def test_the_demand_of_each_pool_with_an_hpa_is_recorded_from_what_is_emitted(
    render: Render,
) -> None:
    rules = demand_rules(render(values=merged(VALUES, {"poolDefaults": HPA})))
    assert [(rule["labels"]["component"], rule["labels"]["pool"]) for rule in rules] == [
        ("encode", "main"),
        ("prefill", "main"),
        ("decode", "small"),
        ("decode", "wide"),
        ("diffusion", "main"),
        ("embedding", "main"),
    ]
    for rule, expression in zip(rules, analyse([rule["expr"] for rule in rules]), strict=True):
        assert not expression.labels, f"more than one series: {rule}"
        assert "${" not in rule["expr"]
    assert demand_rules(render(values=VALUES)) == []


def wanted(hpa: Manifest, demand: float) -> int:
    """Return the replicas that the HPA's controller wants for an external metric's value.

    `desired = ceil(value / averageValue)` within the bounds, as in Kubernetes' "Horizontal Pod
    Autoscaling"; how fast it gets there is the behavior's.
    """
    (metric,) = hpa["spec"]["metrics"]
    least, most = int(hpa["spec"]["minReplicas"]), int(hpa["spec"]["maxReplicas"])
    target = float(metric["external"]["target"]["averageValue"])
    return max(least, min(most, math.ceil(demand / target)))


# What waits at the Processors, and what each of two pods runs and queues, 4 at most. On a real
# cluster 16 of 24 requests waited, and the engines' own queues were empty.
@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        ((16, 4, 0), (4.0, 4)),
        ((0, 1, 0), (0.5, 1)),
        ((0, 4, 0), (2.0, 3)),
        ((2, 4, 1), (2.75, 4)),
        ((0, 0, 0), (0, 1)),
    ],
)
def test_an_hpa_adds_workers_for_what_waits_at_the_processors(
    seen: tuple[int, int, int],
    expected: tuple[float, int],
    render: Render,
    promtool: Path,
    tmp_path: Path,
) -> None:
    """By a stand-in for prometheus-adapter, which takes the rule file that we ship."""
    (waiting, running, queued), (demand, replicas) = seen, expected
    manifests = render(values=merged(VALUES, {"decode": {"pools": {"small": HPA}}}))
    (hpa,) = objects(manifests, "HorizontalPodAutoscaler")
    external = hpa["spec"]["metrics"][0]["external"]
    adapter = yaml.safe_load((CHART.parent / "prometheus-adapter.yaml").read_text("utf-8"))
    (rule,) = adapter["rules"]["external"]
    assert rule["name"]["as"] == external["metric"]["name"]
    (series,) = re.findall(r'__name__="([^"]+)"', rule["seriesQuery"])
    # The adapter adds the HPA's namespace and selector.
    (namespaced,) = rule["resources"]["overrides"]
    labels = {namespaced: NAMESPACE, **external["metric"]["selector"]["matchLabels"]}
    matchers = ",".join(f'{name}="{value}"' for name, value in labels.items())
    asked = rule["metricsQuery"].replace("<<.Series>>", series)
    scope = f'namespace="{NAMESPACE}", job="{RELEASE}-millstream"'
    worker = f'{scope}, component="decode", pool="small"'
    values: dict[str, int] = {
        f'millstream_admission_queued_requests{{{scope}, model="chat-7b"}}': waiting
    }
    for pod in "ab":
        values[f'millstream_engine_running_requests{{{worker}, pod="{pod}"}}'] = running
        values[f'millstream_engine_queued_requests{{{worker}, pod="{pod}"}}'] = queued
        values[f'millstream_engine_max_running_requests{{{worker}, pod="{pod}"}}'] = 4
    rules, unit = tmp_path / "rules.yaml", tmp_path / "test.yaml"
    group = {"name": "demand", "rules": demand_rules(manifests)}
    rules.write_text(json.dumps({"groups": [group]}), encoding="utf-8")
    sample = [{"labels": "{}", "value": demand}]
    expression = asked.replace("<<.LabelMatchers>>", matchers)
    case = {"expr": expression, "eval_time": "1m", "exp_samples": sample}
    test = {
        "interval": "1m",
        "input_series": [{"series": name, "values": f"{n}x2"} for name, n in values.items()],
        "promql_expr_test": [case],
    }
    unit.write_text(json.dumps({"rule_files": [str(rules)], "tests": [test]}), encoding="utf-8")
    ran = subprocess.run(
        [promtool, "test", "rules", unit], capture_output=True, text=True, check=False, timeout=100
    )
    assert not ran.returncode, ran.stdout + ran.stderr
    assert wanted(hpa, demand) == replicas


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
