"""Which objects a release has, by kind and name, and what holds of all objects of a kind."""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
import yaml

from tests.support.deploy.deploy_tools import (
    CHART,
    NAMESPACE,
    RELEASE,
    Manifest,
    objects,
    values_files,
)
from tests.support.deploy.kube_rules import selects, workloads
from tests.support.deploy.rendered_pools import RenderedPool, rendered_pools

Render = Callable[..., list[Manifest]]
NAME = f"{RELEASE}-millstream"
VALUES = values_files()
Names = Mapping[str, set[str]]
POOLS = {
    "all": "encode-main prefill-main decode-vision decode-small decode-large diffusion-images"
    " diffusion-videos diffusion-text embedding-vectors embedding-scores",
    "cpu-demo": "prefill-main decode-main",
    "epd": "encode-main prefill-main decode-main",
    "multinode": "decode-main",
    "pd": "prefill-main decode-main",
    "single-gpu": "decode-main",
    "vllm": "prefill-sglang prefill-vllm decode-sglang decode-vllm",
}
GROUPS = {"all": "decode-large", "multinode": "decode-main"}
DOWNLOADS = {"all": "qwen-vl deepseek", "epd": "qwen-vl", "multinode": "deepseek", "pd": "llama"}
ALWAYS = {
    "Pod": "check",
    "PodMonitor": "",
    "PrometheusRule": "",
    "Role": "discovery",
    "RoleBinding": "discovery",
    "Secret": "ticket-key",
    "Service": "processor processors workers",
    "ServiceAccount": "processor worker",
}
SECURED = {
    "Certificate": "processor-tls encode-tls prefill-tls decode-tls diffusion-tls embedding-tls",
    "Secret": "ticket-key api-keys",
}
"""What `all` has beyond: certificates, keys."""


def names(manifests: Sequence[Manifest]) -> Names:
    """Names by kind, without the release's and digests; policies have tests of what they allow."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    for one in manifests:
        name = re.sub(r"-[0-9a-f]{8}$", "", one["metadata"]["name"])
        suffix = name.removeprefix(NAME).removeprefix("-")
        if one["kind"] != "NetworkPolicy":
            found[one["kind"]].add(suffix)
    return found


@pytest.mark.parametrize("example", VALUES)
def test_an_example_has_these_objects(example: str, render: Render) -> None:
    pools = {"processor", *POOLS[example].split()}
    groups = set(GROUPS.get(example, "").split())
    models = DOWNLOADS.get(example, "").split()
    always = ALWAYS | (SECURED if example == "all" else {})
    expected = {kind: set(each.split(" ")) for kind, each in always.items()} | {
        "ConfigMap": pools,
        "Deployment": pools - groups,
        "Job": {f"fetch-{model}" for model in models},
        "LeaderWorkerSet": groups,
        "PersistentVolumeClaim": {f"model-{model}" for model in models},
        "PodDisruptionBudget": pools,
    }
    assert names(render(example)) == {kind: each for kind, each in expected.items() if each}


SWITCHES: list[tuple[dict[str, Any], dict[str, str], str]] = [
    ({"poolDefaults": {"pdb": {"enabled": False}}}, {}, "PodDisruptionBudget"),
    ({"networkPolicy": {"enabled": False}}, {}, "NetworkPolicy"),
    ({"helmTest": {"enabled": False}}, {}, "Pod"),
    (
        {"serviceAccount": {"create": False, "processorName": "watcher"}},
        {},
        "ServiceAccount",
    ),
    ({"monitoring": {"podMonitor": {"enabled": False}}}, {}, "PodMonitor"),
    ({"monitoring": {"rules": {"enabled": False}}}, {}, "PrometheusRule"),
    ({"security": {"ticketKey": {"existingSecret": "mine"}}}, {}, "Secret"),
    (
        {"monitoring": {"dashboards": {"enabled": True}}},
        {"ConfigMap": "dashboard-capacity dashboard-media dashboard-overview dashboard-workers"},
        "",
    ),
    (
        {
            "gateway": {
                "route": {
                    "enabled": True,
                    "parentRefs": [{"name": "g"}],
                    "http": {"enabled": True},
                },
                "ingress": {"enabled": True, "host": "chat.example.com"},
                "inferencePool": {"enabled": True, "endpointPicker": {"name": "picker"}},
            }
        },
        dict.fromkeys(("GRPCRoute", "HTTPRoute", "Ingress", "InferencePool"), "processor"),
        "",
    ),
    (
        {
            "processor": {"autoscaling": {"kind": "hpa"}},
            "decode": {"autoscaling": {"kind": "keda", "targets": {"firstTokenSeconds": 2}}},
            "monitoring": {"prometheus": {"url": "http://prometheus"}},
        },
        {"HorizontalPodAutoscaler": "processor", "ScaledObject": "decode-main"},
        "",
    ),
]


@pytest.mark.parametrize(("values", "more", "gone"), SWITCHES)
def test_a_switch_adds_and_removes_whole_kinds(
    values: dict[str, Any], more: dict[str, str], gone: str, render: Render
) -> None:
    before, after = render("single-gpu"), render("single-gpu", values=values)
    assert objects(before, gone) or more
    assert not objects(after, gone)
    expected = {kind: set(each) for kind, each in names(before).items() if kind != gone}
    for kind, added in more.items():
        expected.setdefault(kind, set()).update(added.split())
    assert names(after) == expected


# ---- of every object


@pytest.mark.parametrize("example", VALUES)
def test_every_object_is_named_and_labelled_as_the_releases(example: str, render: Render) -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    of_pods = {
        "app.kubernetes.io/name": "millstream",
        "app.kubernetes.io/instance": RELEASE,
        "app.kubernetes.io/part-of": "millstream",
    }
    of_objects = {
        **of_pods,
        "app.kubernetes.io/version": chart["appVersion"],
        "app.kubernetes.io/managed-by": "Helm",
        "helm.sh/chart": f"millstream-{chart['version']}",
    }
    cut = hashlib.sha256(NAME.encode()).hexdigest()[:8]
    for one in render(example):
        metadata = one["metadata"]
        assert metadata["namespace"] == NAMESPACE
        assert metadata["name"].startswith(NAME) or cut in metadata["name"]
        assert metadata["labels"].items() >= of_objects.items()
    for workload, template in workloads(render(example)):
        labels = template["metadata"]["labels"]
        assert labels.items() >= of_pods.items()
        for label in ("app.kubernetes.io/component", "millstream.io/pool", "millstream.io/model"):
            assert labels.get(label) == workload["metadata"]["labels"].get(label)
        # An upgrade of the chart alone would restart every engine.
        assert workload["kind"] == "Pod" or "helm.sh/chart" not in labels


def of_each(render: Render) -> Iterator[tuple[list[Manifest], RenderedPool]]:
    """Every pool of every example, with all objects of its release."""
    for manifests in map(render, VALUES):
        yield from ((manifests, pool) for pool in rendered_pools(manifests))


def test_every_pool_has_a_budget_and_its_file(render: Render) -> None:
    for manifests, pool in of_each(render):
        there = {(one["kind"], one["metadata"]["name"]): one for one in manifests}
        budget = there["PodDisruptionBudget", pool.name]["spec"]
        assert (budget["maxUnavailable"], budget["unhealthyPodEvictionPolicy"]) == (
            1,
            "AlwaysAllow",
        )
        chosen = {
            workload["metadata"]["name"]
            for workload, template in workloads(manifests)
            if selects(budget["selector"], template["metadata"]["labels"])
        }
        assert chosen == {pool.name}
        text = there["ConfigMap", pool.name]["data"]["config.yaml"]
        checksum = pool.template["metadata"]["annotations"]["checksum/config"]
        assert checksum == hashlib.sha256(text.rstrip().encode()).hexdigest()
        assert pool.pod["volumes"][0]["configMap"] == {"name": pool.name}


def test_every_pools_pods_run_their_service(render: Render) -> None:
    text = {"prefill", "decode"}
    for _, pool in of_each(render):
        role, image = pool.role, "processor" if pool.role == "processor" else "worker"
        variables = {one["name"] for one in pool.container["env"]}
        program, file = f"millstream_server.{role}", "/etc/millstream/config.yaml"
        assert pool.container["args"] == ["python", "-m", program, "--config", file]
        assert (
            pool.environment.items() >= {"HOME": "/home/millstream", "HF_HUB_OFFLINE": "1"}.items()
        )
        assert ("MILLSTREAM_BOOTSTRAP_HOST" in variables) is (role in text)
        assert ("MILLSTREAM_TICKET_KEY" in variables) is (role in text | {"processor", "encode"})
        assert pool.pod["serviceAccountName"] == f"{NAME}-{image}"
        mounts = {one["name"]: one["mountPath"] for one in pool.container["volumeMounts"]}
        assert mounts["config"] == file
        assert mounts["home"] == pool.environment["HOME"]
        assert ("shm" in mounts) is (role != "processor")


def test_replicas_are_spread_and_rolled_out_as_the_values_say(render: Render) -> None:
    for _, pool in of_each(render):
        spread = {one["topologyKey"]: one for one in pool.pod["topologySpreadConstraints"]}
        assert set(spread) == {"kubernetes.io/hostname", "topology.kubernetes.io/zone"}
        labels = pool.template["metadata"]["labels"]
        assert all(selects(one["labelSelector"], labels) for one in spread.values())
        spec = pool.workload["spec"]
        if pool.workload["kind"] == "Deployment":
            ready_s = 35 if pool.role == "processor" else 5
            assert (spec["minReadySeconds"], spec["strategy"]["type"]) == (ready_s, "RollingUpdate")
        else:
            assert spec["startupPolicy"] == "LeaderCreated"
            group = spec["leaderWorkerTemplate"]
            assert group["restartPolicy"] == "RecreateGroupOnPodRestart"
            rolling = spec["rolloutStrategy"]["rollingUpdateConfiguration"]
            assert rolling == {"maxSurge": 0, "maxUnavailable": 1}


def test_models_are_downloaded_once_into_a_claim_of_their_size(render: Render) -> None:
    for example, size in (("pd", "200Gi"), ("epd", "40Gi"), ("multinode", "800Gi")):
        (job,), (claim,) = (
            objects(render(example), kind) for kind in ("Job", "PersistentVolumeClaim")
        )
        assert claim["spec"]["resources"] == {"requests": {"storage": size}}
        assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
        (rule,) = job["spec"]["podFailurePolicy"]["rules"]
        # Exit code 2: somebody has to change the URI or the token first.
        assert rule["onExitCodes"] == {"containerName": "fetch", "operator": "In", "values": [2]}
        assert (rule["action"], job["spec"]["backoffLimit"]) == ("FailJob", 20)
        assert job["spec"]["template"]["spec"]["restartPolicy"] == "Never"


def test_services_lead_to_grpc_and_workers_are_found_before_they_are_ready(render: Render) -> None:
    for manifests in map(render, VALUES):
        services = {one["metadata"]["name"]: one["spec"] for one in objects(manifests, "Service")}
        for name, headless, early in (
            ("processor", False, False),
            ("processors", True, False),
            ("workers", True, True),
        ):
            spec = services[f"{NAME}-{name}"]
            ports = {port["name"]: (port["port"], port["targetPort"]) for port in spec["ports"]}
            metrics = {"metrics": (9464, "metrics")} if headless else {}
            assert ports == {"grpc": (50051, "grpc"), **metrics}
            assert (spec.get("clusterIP") == "None") is headless
            assert spec.get("publishNotReadyAddresses", False) is early


def test_the_processors_account_may_read_endpoint_slices(render: Render) -> None:
    manifests = render("all")
    (role,), (binding,) = objects(manifests, "Role"), objects(manifests, "RoleBinding")
    api = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role"}
    assert binding["roleRef"] == {**api, "name": role["metadata"]["name"]}
    account = {"name": f"{NAME}-processor", "namespace": NAMESPACE}
    assert binding["subjects"] == [{"kind": "ServiceAccount", **account}]
    for one in objects(manifests, "ServiceAccount"):
        assert one["automountServiceAccountToken"] is False


def test_certificates_serve_and_call_and_are_renewed_in_time(render: Render) -> None:
    manifests = render("all")
    issuer = {"name": "millstream-ca", "kind": "ClusterIssuer", "group": "cert-manager.io"}
    spec: dict[str, Any] = {
        "issuerRef": issuer,
        "duration": "2160h",
        "renewBefore": "720h",
        "privateKey": {"algorithm": "ECDSA", "size": 256, "rotationPolicy": "Always"},
        "usages": ["digital signature", "server auth", "client auth"],
    }
    for one in objects(manifests, "Certificate"):
        assert one["spec"].items() >= spec.items()
        assert one["spec"]["secretName"] == one["metadata"]["name"]
    for pool in rendered_pools(manifests):
        secrets = {each["secret"]["secretName"] for each in pool.pod["volumes"] if "secret" in each}
        assert f"{NAME}-{pool.role}-tls" in secrets
        (mount,) = (one for one in pool.container["volumeMounts"] if one["name"] == "tls")
        assert (mount["mountPath"], mount["readOnly"]) == ("/etc/millstream/tls", True)


def test_helm_test_checks_what_the_release_serves(render: Render) -> None:
    for example in VALUES:
        (pod,) = objects(render(example), "Pod")
        assert pod["metadata"]["annotations"]["helm.sh/hook"] == "test"
        (container,) = pod["spec"]["containers"]
        address = f"{NAME}-processor.{NAMESPACE}.svc:50051"
        assert container["args"][:5] == ["millstream", "check", address, "--wait", "240"]
        pools = POOLS[example]
        assert ("--disaggregated" in container["args"]) is ("prefill" in pools)
        secured = example == "all"
        assert ("/etc/millstream/tls/ca.crt" in container["args"]) is secured
        assert ("MILLSTREAM_API_KEY" in str(container["env"])) is secured


def test_pods_are_scraped_every_15_seconds(render: Render) -> None:
    for manifests in map(render, VALUES):
        (monitor,) = objects(manifests, "PodMonitor")
        (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
        times = {"interval": "15s", "scrapeTimeout": "10s"}
        assert endpoint.items() >= {"port": "metrics", "path": "/metrics", **times}.items()
        assert endpoint["relabelings"][0] == {"targetLabel": "job", "replacement": NAME}


def test_scalers_keep_their_bounds_and_pace(render: Render) -> None:
    manifests = render("single-gpu", values=SWITCHES[-1][0])
    (hpa,) = objects(manifests, "HorizontalPodAutoscaler")
    (keda,) = objects(manifests, "ScaledObject")
    assert (hpa["spec"]["minReplicas"], hpa["spec"]["maxReplicas"]) == (2, 4)
    assert hpa["spec"]["metrics"][0]["resource"]["target"]["averageUtilization"] == 40
    counts = ("minReplicaCount", "maxReplicaCount", "pollingInterval")
    assert [keda["spec"][count] for count in counts] == [1, 4, 15]
    behavior = keda["spec"]["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    policy = {"type": "Pods", "value": 2, "periodSeconds": 120}
    up = {"stabilizationWindowSeconds": 0, "policies": [policy]}
    assert behavior["scaleUp"] == hpa["spec"]["behavior"]["scaleUp"] == up
    targets = {
        one["name"]: (one["metadata"]["threshold"], one["metricType"])
        for one in keda["spec"]["triggers"]
    }
    assert targets == {
        "firstTokenSeconds": ("2", "Value"),
        "kvCache": ("0.75", "AverageValue"),
        "waitingRequests": ("4", "AverageValue"),
    }
