"""What may change in a release: rendered before and after, no field differs that can't change.

The table is in the chart's README, "What may change in place".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from tests.support.deploy.deploy_tools import Manifest

Render = Callable[..., list[Manifest]]
FIXED: dict[str, tuple[str, ...]] = {
    "Deployment": ("spec.selector",),
    "Job": ("spec.template", "spec.podFailurePolicy", "spec.selector"),
    "PersistentVolumeClaim": ("spec.accessModes", "spec.storageClassName", "spec.volumeMode"),
    "RoleBinding": ("roleRef",),
    "Secret": ("type",),
    "Service": ("spec.clusterIP",),
}
"""By kind, the fields that an API server doesn't let change."""
NODES = {"decode": {"pools": {"main": {"parallelism": {"tensor": 2, "nodes": 2}}}}}


def field(manifest: Manifest, path: str) -> Any:
    value: Any = manifest
    for key in path.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return value


def refused(before: Sequence[Manifest], after: Sequence[Manifest]) -> Iterator[str]:
    """What an API server would refuse when ``after`` is applied over ``before``."""
    there = {(one["kind"], one["metadata"]["name"]): one for one in before}
    for one in after:
        old = there.get((one["kind"], one["metadata"]["name"]))
        for path in FIXED.get(one["kind"], ()) if old else ():
            if field(old or {}, path) != field(one, path):
                yield f"{one['kind']} {one['metadata']['name']}: {path}"


def workloads(manifests: Sequence[Manifest]) -> set[tuple[str, str]]:
    kinds = {"Deployment", "LeaderWorkerSet"}
    return {(one["kind"], one["metadata"]["name"]) for one in manifests if one["kind"] in kinds}


@pytest.mark.parametrize(
    "change",
    [
        {"decode": {"settings": {"max_running_requests": 8}, "engineArgs": {"page_size": 16}}},
        {"decode": {"replicas": 5}, "processor": {"replicas": 3}},
        {"prefill": {"parallelism": {"tensor": 8}, "resources": {"limits": {"memory": "1Ti"}}}},
        {"processor": {"autoscaling": {"kind": "hpa"}, "pdb": {"enabled": False}}},
        {"poolDefaults": {"podLabels": {"team": "a"}, "nodeSelector": {"gpu": "h100"}}},
        {"poolDefaults": {"rdma": {"enabled": True}, "env": [{"name": "A", "value": "b"}]}},
        {"image": {"processor": {"tag": "2"}, "worker": {"tag": "2"}}},
        {"downloads": {"tolerations": [{"operator": "Exists"}], "limitSeconds": 60}},
        {"models": {"llama": {"revision": "v2", "size": "300Gi"}}},
        {"models": {"llama": {"servedName": "other"}}},
        {"discovery": {"kind": "dns", "dnsTtlSeconds": 5}, "networkPolicy": {"enabled": False}},
        {"security": {"apiKeys": {"enabled": True}}},
        {"security": {"tls": {"enabled": True, "existingSecret": "certificates"}}},
        {
            "processor": {"service": {"type": "LoadBalancer", "port": 443}},
            "networkPolicy": {"clients": [{"ipBlock": {"cidr": "10.0.0.0/8"}}]},
        },
        {"commonLabels": {"team": "a"}, "commonAnnotations": {"example.com/cost": "42"}},
    ],
    ids=str,
)
def test_a_change_in_place_touches_no_fixed_field(change: dict[str, Any], render: Render) -> None:
    before, after = render("pd"), render("pd", values=change)
    assert list(refused(before, after)) == []
    assert workloads(before) == workloads(after)


def test_a_group_and_a_pod_are_different_objects(render: Render) -> None:
    before, after = render("single-gpu"), render("single-gpu", values=NODES)
    assert workloads(before) - workloads(after) == {("Deployment", "suite-millstream-decode-main")}


@pytest.mark.parametrize(
    "change",
    [
        {"decode": {"pools": {"main": None, "other": {"model": "qwen"}}}},
        {"fullnameOverride": "other"},
        {"nameOverride": "other"},
    ],
    ids=str,
)
def test_another_name_makes_other_objects(change: dict[str, Any], render: Render) -> None:
    before, after = render("single-gpu"), render("single-gpu", values=change)
    decode = {name for _, name in workloads(before) - workloads(after)}
    assert "suite-millstream-decode-main" in decode
    assert list(refused(before, after)) == []


@pytest.mark.parametrize(
    ("change", "fixed"),
    [
        ({"nameOverride": "other"}, "Deployment fixed-processor: spec.selector"),
        (
            {"models": {"llama": {"storageClass": "fast"}}},
            "PersistentVolumeClaim fixed-model-llama-fc5a1047: spec.storageClassName",
        ),
        (
            {"models": {"llama": {"accessModes": ["ReadOnlyMany"]}}},
            "PersistentVolumeClaim fixed-model-llama-fc5a1047: spec.accessModes",
        ),
    ],
)
def test_what_can_never_change(change: dict[str, Any], fixed: str, render: Render) -> None:
    name = {"fullnameOverride": "fixed"}
    found = refused(render("pd", values=name), render("pd", values={**name, **change}))
    assert fixed in list(found)
