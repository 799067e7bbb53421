"""The chart's NetworkPolicies allow what the roles need, and nothing else."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from tests.support.deploy.deploy_tools import (
    NAMESPACE,
    Helm,
    Manifest,
    RenderError,
    merged,
    objects,
)
from tests.support.deploy.network_policies import End, allowed

Render = Callable[..., list[Manifest]]
GRPC, METRICS, BOOTSTRAP, RANDOM, HTTPS, DNS, SSH = 50051, 9464, 8998, 49500, 443, 53, 22
PORTS = (GRPC, METRICS, BOOTSTRAP, RANDOM, HTTPS, DNS, SSH)
WORKERS = {"encode", "prefill", "decode", "diffusion", "embedding"}
VALUES: dict[str, Any] = {
    "models": {
        # With a download job; the workers of `whole` and the Processor fetch files themselves.
        "split": {
            "uri": "hf://org/split",
            "download": "job",
            "size": "1Gi",
            "accessModes": ["ReadWriteMany"],
        },
        "whole": {"uri": "hf://org/whole"},
        "pictures": {"uri": "pvc://claim/pictures"},
        "vectors": {"uri": "pvc://claim/vectors"},
    },
    "encode": {
        "enabled": True,
        "pools": {"split": {"model": "split"}, "whole": {"model": "whole"}},
    },
    "prefill": {"enabled": True, "pools": {"split": {"model": "split"}}},
    "decode": {
        "enabled": True,
        "pools": {
            "split": {"model": "split", "parallelism": {"tensor": 16, "nodes": 2}},
            "whole": {"model": "whole"},
        },
    },
    "diffusion": {"enabled": True, "pools": {"main": {"model": "pictures"}}},
    "embedding": {"enabled": True, "pools": {"main": {"model": "vectors"}}},
}
DNS_ALONE = {"discovery": {"kind": "dns", "dnsTtlSeconds": 0}}
OTHERS = [
    End("a client", "10.1.0.1", NAMESPACE, {"app": "chat"}),
    End("a stranger", "10.1.0.2", "elsewhere", {"app": "chat"}),
    End("Prometheus", "10.1.0.3", "monitoring", {"app": "prometheus"}),
    End("DNS", "10.1.0.4", "kube-system", {"k8s-app": "kube-dns"}),
    End("DNS cache", "169.254.20.10"),
    End("metadata", "169.254.169.254"),
    End("Kubernetes API", "10.96.0.1"),
    End("the internet", "140.82.121.3"),
    End("the internet by IPv6", "2606:50c0::1"),
]


def pods(manifests: Sequence[Manifest]) -> Iterator[End]:
    """One of each kind of pod, two of those that span nodes."""
    number = itertools.count(1)

    def end(about: Manifest, name: str) -> End:
        labels = about["metadata"]["labels"]
        return End(name, f"10.2.0.{next(number)}", NAMESPACE, labels)

    for manifest in manifests:
        kind, name = manifest["kind"], manifest["metadata"]["name"]
        if kind in {"Deployment", "Job"}:
            yield end(manifest["spec"]["template"], name)
        elif kind == "LeaderWorkerSet":
            group = manifest["spec"]["leaderWorkerTemplate"]
            yield end(group.get("leaderTemplate", group["workerTemplate"]), f"{name}, leader")
            yield end(group["workerTemplate"], name)
        elif kind == "Pod":
            yield end(manifest, name)


def role(end: End) -> str:
    return end.labels.get("app.kubernetes.io/component", "")


def _is(end: End, *roles: str, model: str) -> bool:
    return role(end) in roles and end.labels.get("millstream.io/model") == model


def needed(source: End, target: End, port: int) -> bool:
    """Whether the suite of VALUES needs a connection: the role graph, in words of its own."""
    roles = (role(source), role(target))
    if role(source) and role(target):
        engines = port == RANDOM
        return (
            (roles[0] == "processor" and roles[1] in WORKERS and port == GRPC)
            or (roles[0] in {"test", "processor"} and roles[1] == "processor" and port == GRPC)
            or (_kv(source, target) and (engines or (roles[1] == "prefill" and port == BOOTSTRAP)))
            or (_fetches(source, target) and (engines or port == GRPC))
            or (_fetches(target, source) and engines)
            or _one_engine(source, target)
        )
    if role(target):
        by_client = source.name == "a client" and role(target) == "processor" and port == GRPC
        return by_client or (source.name == "Prometheus" and port == METRICS)
    if role(source):
        fetches = role(source) in {"processor", "download"} or _is(
            source, "encode", "decode", model="whole"
        )
        dns = target.name.startswith("DNS") and port == DNS
        # To watch EndpointSlices: the chart can't know where the control plane is.
        api = role(source) == "processor" and port == HTTPS
        return dns or api or (fetches and target.name.startswith("the internet") and port == HTTPS)
    return True  # not ours to forbid


def _kv(one: End, other: End) -> bool:
    return {role(one), role(other)} == {"prefill", "decode"} and all(
        _is(end, "prefill", "decode", model="split") for end in (one, other)
    )


def _fetches(one: End, other: End) -> bool:
    return (_is(one, "prefill", model="split") and _is(other, "encode", model="split")) or (
        _is(one, "decode", model="whole") and _is(other, "encode", model="whole")
    )


def _one_engine(one: End, other: End) -> bool:
    return _is(one, "decode", model="split") and _is(other, "decode", model="split")


def test_policies_follow_the_role_graph(render: Render) -> None:
    manifests = render(values=VALUES)
    policies = objects(manifests, "NetworkPolicy")
    ours = list(pods(manifests))
    assert {role(end) for end in ours} == WORKERS | {"processor", "download", "test"}
    wrong = [
        f"{source.name} to {target.name}, port {port}: "
        + ("denied" if needed(source, target, port) else "allowed")
        for source, target in itertools.permutations([*ours, *OTHERS], 2)
        for port in PORTS
        if allowed(policies, source, target, port) != needed(source, target, port)
    ]
    assert not wrong, "\n".join(wrong)


def test_dns_works_by_udp_too_and_nothing_else_does(render: Render) -> None:
    manifests = render(values=VALUES)
    policies = objects(manifests, "NetworkPolicy")
    for pod in pods(manifests):
        for other in OTHERS:
            is_dns = other.name.startswith("DNS")
            assert allowed(policies, pod, other, DNS, "UDP") is is_dns, (pod, other)


def test_every_pod_is_denied_by_default(render: Render) -> None:
    """Also one that only shares the release's labels."""
    manifests = render(values=VALUES)
    policies = objects(manifests, "NetworkPolicy")
    new = {
        name: value
        for name, value in next(pods(manifests)).labels.items()
        if name in {"app.kubernetes.io/name", "app.kubernetes.io/instance"}
    }
    pod = End("a new one", "10.2.1.1", NAMESPACE, new)
    for other in OTHERS:
        assert allowed(policies, other, pod, METRICS) is (other.name == "Prometheus")
        assert not allowed(policies, other, pod, GRPC)
        assert not allowed(policies, pod, other, HTTPS)


@pytest.mark.parametrize(
    ("values", "who", "target", "port"),
    [
        ({"discovery": {"kind": "endpointslices"}}, "processor", "Kubernetes API", HTTPS),
        ({"processor": {"settings": {"fetch_urls": True}}}, "processor", "the internet", 80),
        (
            {
                "diffusion": {"settings": {"storage_url": "s3://b"}},
                "networkPolicy": {
                    "storage": [{"to": [{"ipBlock": {"cidr": "10.96.0.1/32"}}]}],
                },
            },
            "diffusion",
            "Kubernetes API",
            9000,
        ),
        (
            {
                "prefill": {"settings": {"otlp_endpoint": "http://otel.monitoring:4317"}},
                "networkPolicy": {
                    "tracing": [
                        {"to": [{"namespaceSelector": {}}], "ports": [{"port": 4317}]},
                    ]
                },
            },
            "prefill",
            "Prometheus",
            4317,
        ),
    ],
    ids=["endpointslices", "URLs", "storage", "tracing"],
)
def test_what_a_setting_needs_is_allowed_to_its_role_alone(
    values: dict[str, Any], who: str, target: str, port: int, render: Render
) -> None:
    (other,) = (end for end in OTHERS if end.name == target)
    without = merged(VALUES, DNS_ALONE)
    for given, expected in ((without, set()), (merged(without, values), {who})):
        manifests = render(values=given)
        policies = objects(manifests, "NetworkPolicy")
        may = {role(end) for end in pods(manifests) if allowed(policies, end, other, port)}
        assert may == expected


def test_decode_workers_reach_a_port_per_copy_of_vllm(render: Render) -> None:
    values = {"prefill": {"pools": {"vllm": {"parallelism": {"data": 2}}}}}
    manifests = render("vllm", values=values)
    policies = objects(manifests, "NetworkPolicy")
    ours = {(role(end), end.labels.get("millstream.io/pool")): end for end in pods(manifests)}
    prefill, decode = ours["prefill", "vllm"], ours["decode", "vllm"]
    for port, may in ((BOOTSTRAP, True), (BOOTSTRAP + 1, True), (BOOTSTRAP + 2, False)):
        assert allowed(policies, decode, prefill, port) is may
        assert not allowed(policies, prefill, decode, port)
        assert not allowed(policies, ours["processor", "main"], prefill, port)


@pytest.mark.parametrize("port", [32768, 50052, 60999])
def test_vllms_push_reaches_decode_on_any_port_that_a_kernel_gives(
    port: int, render: Render
) -> None:
    manifests = render("vllm")
    policies = objects(manifests, "NetworkPolicy")
    ours = {(role(end), end.labels.get("millstream.io/pool")): end for end in pods(manifests)}
    decode = ours["decode", "vllm"]
    assert allowed(policies, ours["prefill", "vllm"], decode, port)
    assert not allowed(policies, ours["processor", "main"], decode, port)


@pytest.mark.parametrize("policy", ["Local", "Cluster"])
def test_what_the_load_balancer_lets_in_reaches_the_processor(policy: str, render: Render) -> None:
    service = {
        "type": "LoadBalancer",
        "externalTrafficPolicy": policy,
        "loadBalancerSourceRanges": ["140.82.0.0/16"],
    }
    nodes = [{"ipBlock": {"cidr": "10.9.0.0/16"}}]
    values = {"processor": {"service": service}, "networkPolicy": {"clients": nodes}}
    manifests = render(values=merged(VALUES, values))
    policies = objects(manifests, "NetworkPolicy")
    (processor,) = (end for end in pods(manifests) if role(end) == "processor")
    # Else it would come with the address of a node.
    local = policy == "Local"
    assert allowed(policies, End("out", "140.82.121.3"), processor, GRPC) is local
    assert allowed(policies, End("a node", "10.9.1.1"), processor, GRPC)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        (
            {"processor": {"settings": {"otlp_endpoint": "http://otel:4317"}}},
            "processor.settings.otlp_endpoint is http://otel:4317, but no NetworkPolicy lets spans",
        ),
        (
            {"discovery": {"extraWorkers": ["far:50051"]}},
            "discovery.extraWorkers has 1 entries, but no NetworkPolicy lets the Processor reach",
        ),
    ],
)
def test_what_no_policy_lets_out_is_refused(
    values: dict[str, Any], sentence: str, helm4: Helm
) -> None:
    with pytest.raises(RenderError, match=sentence):
        helm4.text(values=merged(VALUES, values))
    assert "kind: NetworkPolicy" not in helm4.text(
        values=merged(merged(VALUES, values), {"networkPolicy": {"enabled": False}})
    )
