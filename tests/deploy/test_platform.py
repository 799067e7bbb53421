"""What a platform team sets on every workload: volumes, sidecars, labels, ids, schedulers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tests.support.deploy.deploy_tools import KUBERNETES, Manifest, objects
from tests.support.deploy.kube_rules import broken_rules, workloads
from tests.support.deploy.rendered_pools import pool_of

Render = Callable[..., list[Manifest]]
EVERYTHING: dict[str, Any] = {
    "labels": {"kueue.x-k8s.io/queue-name": "gpus"},
    "annotations": {"team": "inference"},
    "extraVolumes": [{"name": "scratch", "emptyDir": {}}],
    "extraVolumeMounts": [{"name": "scratch", "mountPath": "/scratch"}],
    "initContainers": [{"name": "first", "image": "tool:1"}],
    "sidecars": [{"name": "proxy", "image": "proxy:1"}],
    "schedulerName": "gang",
    "hostNetwork": True,
    "dnsConfig": {"options": [{"name": "ndots", "value": "2"}]},
    "gpu": {"resource": ""},
    "resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "one-gpu"}],
    "resources": {"claims": [{"name": "gpu"}]},
    "envFrom": [{"configMapRef": {"name": "nccl"}}],
}


@pytest.mark.parametrize("example", ["single-gpu", "multinode"])
def test_a_pool_takes_all_of_it(
    example: str,
    render: Render,
    kube_validate: Callable[[Sequence[Manifest], str], None],
) -> None:
    manifests = render(example, values={"decode": EVERYTHING})
    kube_validate(manifests, KUBERNETES[-1])
    assert broken_rules(manifests) == []
    pool = pool_of(manifests, "decode")
    metadata, pod, container = pool.workload["metadata"], pool.pod, pool.container
    assert metadata["labels"].items() >= EVERYTHING["labels"].items()
    assert metadata["annotations"] == EVERYTHING["annotations"]
    assert pod["volumes"][-1] == EVERYTHING["extraVolumes"][0]
    assert container["volumeMounts"][-1] == EVERYTHING["extraVolumeMounts"][0]
    proxy, first, *_ = pod["initContainers"]
    assert (proxy["name"], proxy["restartPolicy"], first["name"]) == ("proxy", "Always", "first")
    assert pod["initContainers"][-1]["name"] in {"fetch-model", "wait-for-model"}
    assert (pod["schedulerName"], pod["hostNetwork"]) == ("gang", True)
    assert pod["dnsPolicy"] == "ClusterFirstWithHostNet"
    assert pod["dnsConfig"] == EVERYTHING["dnsConfig"]
    assert pod["resourceClaims"] == EVERYTHING["resourceClaims"]
    assert container["resources"]["claims"] == [{"name": "gpu"}]
    assert container["envFrom"] == EVERYTHING["envFrom"]


def test_common_labels_and_annotations_are_on_every_object_and_pod(render: Render) -> None:
    common = {"commonLabels": {"team": "a"}, "commonAnnotations": {"example.com/cost": "42"}}
    own = {"labels": {"team": "b"}, "podLabels": {"team": "c"}, "podAnnotations": {"note": "x"}}
    manifests = render("all", values={**common, "decode": own})
    found = [*manifests, *(template for _, template in workloads(manifests))]
    found += [
        {"metadata": one["spec"]["secretTemplate"]} for one in objects(manifests, "Certificate")
    ]
    for one in found:
        assert one["metadata"]["annotations"]["example.com/cost"] == "42", one["metadata"]
        assert "team" in one["metadata"]["labels"], one["metadata"]
    pool = pool_of(manifests, "decode", "small")
    assert pool.workload["metadata"]["labels"]["team"] == "b"
    assert pool.template["metadata"]["labels"]["team"] == "c"
    assert pool.template["metadata"]["annotations"]["note"] == "x"
    # Selectors can't change, so none has it.
    for deployment in objects(manifests, "Deployment"):
        assert "team" not in deployment["spec"]["selector"]["matchLabels"]


def test_an_ephemeral_claim_has_the_common_labels(render: Render) -> None:
    model = {"qwen": {"storageClass": "ssd", "size": "9Gi"}}
    values = {"models": model, "commonLabels": {"team": "a"}}
    pool = pool_of(render("single-gpu", values=values), "decode")
    (claim,) = (
        v["ephemeral"]["volumeClaimTemplate"] for v in pool.pod["volumes"] if "ephemeral" in v
    )
    assert claim["metadata"]["labels"] == {"team": "a"}


@pytest.mark.parametrize(
    ("given", "ids"),
    [
        ({}, {"runAsUser": 65532, "runAsGroup": 65532, "fsGroup": 65532}),
        ({"user": 1000810000, "group": None}, {"runAsUser": 1000810000, "fsGroup": 65532}),
        ({"user": None, "group": None, "fsGroup": None}, {}),
        (None, {}),
    ],
)
def test_the_cluster_may_give_user_and_group(
    given: dict[str, int | None] | None, ids: dict[str, int], render: Render
) -> None:
    names = {"runAsUser", "runAsGroup", "fsGroup"}
    for _, template in workloads(render("pd", values={"security": {"runAs": given}})):
        context = template["spec"]["securityContext"]
        assert {name: context[name] for name in names & context.keys()} == ids
        assert context["runAsNonRoot"] is True


@pytest.mark.parametrize(
    ("cache", "volume"),
    [
        ({"claim": "kernels"}, {"persistentVolumeClaim": {"claimName": "kernels"}}),
        ({"hostPath": "/var/c"}, {"hostPath": {"path": "/var/c", "type": "Directory"}}),
    ],
)
def test_what_engines_compile_is_kept(
    cache: dict[str, str], volume: dict[str, Any], render: Render
) -> None:
    manifests = render("single-gpu", values={"decode": {"cache": cache}})
    assert broken_rules(manifests) == []
    pool = pool_of(manifests, "decode")
    (found,) = (one for one in pool.pod["volumes"] if one["name"] == "cache")
    assert found == {"name": "cache", **volume}
    (mount,) = (one for one in pool.container["volumeMounts"] if one["name"] == "cache")
    for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
        assert pool.environment[name].startswith(mount["mountPath"] + "/")
    assert mount["mountPath"] == pool.environment["HOME"] + "/.cache"


def test_the_processors_service_is_as_a_load_balancer_wants_it(
    render: Render, kube_validate: Callable[[Sequence[Manifest], str], None]
) -> None:
    options = {
        "loadBalancerClass": "example.com/internal",
        "loadBalancerSourceRanges": ["203.0.113.0/24"],
        "externalTrafficPolicy": "Local",
    }
    service = {"type": "LoadBalancer", "nodePort": 30051, **options}
    manifests = render("pd", values={"processor": {"service": service}})
    kube_validate(manifests, KUBERNETES[-1])
    (found,) = (one for one in objects(manifests, "Service") if "clusterIP" not in one["spec"])
    assert found["spec"].items() >= options.items()
    assert found["spec"]["ports"][0]["nodePort"] == 30051


def test_a_release_name_may_begin_with_a_digit(render: Render) -> None:
    manifests = render("single-gpu", values={"fullnameOverride": "2026-chat"})
    assert broken_rules(manifests) == []
    assert "r2026-chat-processor" in {one["metadata"]["name"] for one in manifests}
