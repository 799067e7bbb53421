"""Pods of the chart: probes, GPUs, groups of nodes, Pod Security, TLS, rollouts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from typing import Any

import pytest
import yaml

from tests.support.deploy.deploy_tools import CHART, Manifest, objects, values_files
from tests.support.deploy.kube_rules import broken_rules, selects, workloads
from tests.support.deploy.rendered_pools import RenderedPool, pool_of, rendered_pools

Render = Callable[..., list[Manifest]]
WORKER_IMAGE = "ghcr.io/millstream/millstream-worker:0.1.0"


def probes(pool: RenderedPool) -> dict[str, dict[str, Any]]:
    return {
        name: pool.container[f"{name}Probe"]["grpc"]
        for name in ("startup", "readiness", "liveness")
    }


def test_probes_ask_by_service_name(render: Render) -> None:
    defaults = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))["poolDefaults"]
    of_values = {name: defaults["probes"][name] for name in ("readiness", "liveness")}
    del of_values["readiness"]["service"]
    for example in values_files():
        for pool in rendered_pools(render(example)):
            startup = readiness = f"millstream.v1.{pool.role.title()}Service"
            if pool.role == "processor":
                # One of several models without workers doesn't take the others away.
                startup, readiness = "liveness", "accepting" if example == "all" else readiness
            port = 50052 if example == "all" else 50051  # beside TLS
            assert probes(pool) == {
                "startup": {"port": port, "service": startup},
                "readiness": {"port": port, "service": readiness},
                "liveness": {"port": port, "service": "liveness"},
            }
            for name, times in of_values.items():
                assert pool.container[f"{name}Probe"].items() >= times.items()


def test_startup_budget_is_what_the_values_say(render: Render) -> None:
    values = {"poolDefaults": {"probes": {"startup": {"limitSeconds": 601, "periodSeconds": 10}}}}
    probe = pool_of(render("single-gpu", values=values), "decode").container["startupProbe"]
    assert (probe["failureThreshold"], probe["periodSeconds"]) == (61, 10)


def test_the_kubelet_speaks_tls_only_where_no_certificate_is_asked_for(render: Render) -> None:
    values = {"security": {"tls": {"probes": True}}}
    for pool in rendered_pools(render("all", values=values)):
        for probe in probes(pool).values():
            if pool.role == "processor":
                assert (probe["port"], probe["mode"]) == (50051, "TLS")
                assert "health_listen" not in pool.config
            else:
                assert (probe["port"], probe.get("mode")) == (50052, None)
                assert pool.config["tls_client_ca_file"]


@pytest.mark.parametrize(
    ("parallelism", "per_pod"),
    [
        ({}, 1),
        ({"tensor": 8}, 8),
        ({"tensor": 4, "pipeline": 2}, 8),
        ({"tensor": 2, "data": 4}, 8),
        ({"tensor": 8, "attentionData": 8}, 8),
        ({"tensor": 16, "nodes": 2}, 8),
        ({"tensor": 8, "pipeline": 3, "nodes": 4}, 6),
    ],
)
def test_gpus_are_computed(parallelism: dict[str, int], per_pod: int, render: Render) -> None:
    values = {"decode": {"pools": {"main": {"parallelism": parallelism}}}}
    pool = pool_of(render("single-gpu", values=values), "decode")
    for kind in ("requests", "limits"):
        assert pool.container["resources"][kind]["nvidia.com/gpu"] == per_pod
    # A process that is killed or ends with a sentence: its last lines are in the pod's status.
    assert pool.container["terminationMessagePolicy"] == "FallbackToLogsOnError"
    # Where the GPU isn't seen the start ends, instead of a worker on the CPU.
    assert pool.config["device"] == "cuda"
    names = {
        "tp_size": "tensor",
        "pp_size": "pipeline",
        "dp_size": "data",
        "attn_dp_size": "attentionData",
    }
    wanted = {
        flag: parallelism[name] for flag, name in names.items() if parallelism.get(name, 1) > 1
    }
    assert pool.config["engine_args"] == {"mem_fraction_static": 0.85, **wanted}


def test_vllm_has_its_image_its_names_and_a_port_per_copy(render: Render) -> None:
    sizes = {"tensor": 2, "pipeline": 2, "data": 2}
    values = {
        "image": {"workerVllm": {"repository": "registry/vllm", "tag": "9"}},
        "decode": {"pools": {"vllm": {"parallelism": sizes}}},
        "prefill": {"pools": {"vllm": {"parallelism": {"data": 2}}}},
    }
    manifests = render("vllm", values=values)
    vllm = pool_of(manifests, "decode", "vllm")
    assert vllm.config["engine_args"] == {
        "gpu_memory_utilization": 0.85,
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 2,
        "data_parallel_size": 2,
    }
    images = {
        (role, name): {
            one["image"] for one in (*pool.pod["initContainers"], *pool.pod["containers"])
        }
        for role in ("prefill", "decode")
        for name in ("sglang", "vllm")
        for pool in [pool_of(manifests, role, name)]
    }
    for (_, name), image in images.items():
        expected = "registry/vllm:9" if name == "vllm" else WORKER_IMAGE
        assert image == {expected}
    prefill = pool_of(manifests, "prefill", "vllm")
    ports = [port["containerPort"] for port in prefill.container["ports"]]
    assert ports == [50051, 9464, 8998, 8999]
    assert vllm.container["resources"]["limits"]["nvidia.com/gpu"] == 8


def test_workers_hand_off_to_their_own_engine_only(render: Render) -> None:
    values = {"prefill": {"pools": {"vllm": None}}}
    manifests = render("vllm", values=values)
    modes = {name: pool_of(manifests, "decode", name).config["mode"] for name in ("sglang", "vllm")}
    assert modes == {"sglang": "disaggregated", "vllm": "aggregated"}


def test_a_group_has_a_leader_and_followers(render: Render) -> None:
    manifests = render("multinode")
    pool = pool_of(manifests, "decode")
    assert pool.workload["kind"] == "LeaderWorkerSet"
    assert pool.workload["spec"]["leaderWorkerTemplate"]["size"] == pool.config["nodes"] == 2
    variables = {one["name"]: one for one in pool.follower["spec"]["containers"][0]["env"]}
    assert variables["MILLSTREAM_LEADER_ADDRESS"]["value"] == "$(LWS_LEADER_ADDRESS):20000"
    rank = variables["MILLSTREAM_NODE_RANK"]["valueFrom"]["fieldRef"]["fieldPath"]
    assert rank == "metadata.labels['leaderworkerset.sigs.k8s.io/worker-index']"
    assert (
        pool.follower["spec"]["containers"][0]["readinessProbe"] == pool.container["readinessProbe"]
    )
    (service,) = (
        one for one in objects(manifests, "Service") if one["metadata"]["name"].endswith("-workers")
    )
    selector = {"matchLabels": service["spec"]["selector"]}
    assert selects(selector, pool.template["metadata"]["labels"])
    assert not selects(selector, pool.follower["metadata"]["labels"])


@pytest.mark.parametrize(
    ("changes", "port"),
    [
        ({}, 21000),
        ({"settings": {"kv_events_port": 0}}, 0),
        ({"settings": {"kv_events_port": 30000}}, 30000),
        ({"parallelism": {"attentionData": 1}}, None),
        ({"parallelism": {"attentionData": 8, "tensor": 8, "nodes": 1}}, None),
    ],
)
def test_ranks_on_other_nodes_tell_their_leader_what_they_cache(
    render: Render, changes: dict[str, Any], port: int | None
) -> None:
    """A rank's events stay on its node by default, where ranks are on one."""
    values = {"decode": {"pools": {"main": changes}}}
    pool = pool_of(render("multinode", values=values), "decode")
    assert pool.config.get("kv_events_port") == port


def test_a_group_stays_in_one_zone_and_groups_are_spread(render: Render) -> None:
    """Spread pod by pod, a group was torn across zones."""
    pool = pool_of(render("multinode"), "decode")
    leader, follower = pool.pod, pool.follower["spec"]
    zones = {one["topologyKey"]: one for one in leader["topologySpreadConstraints"]}
    spread = zones["topology.kubernetes.io/zone"]["labelSelector"]
    assert selects(spread, pool.template["metadata"]["labels"])
    assert not selects(spread, pool.follower["metadata"]["labels"])
    assert "topologySpreadConstraints" not in follower
    for spec in (leader, follower):
        (near,) = spec["affinity"]["podAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
        term = near["podAffinityTerm"]
        assert term["topologyKey"] == "topology.kubernetes.io/zone"
        assert term["matchLabelKeys"] == ["leaderworkerset.sigs.k8s.io/group-key"]
        assert selects(term["labelSelector"], pool.template["metadata"]["labels"])
    # Before 1.31 that field is dropped, and the preference would be for any group's zone.
    assert "affinity" not in pool_of(render("multinode", kubernetes="1.30"), "decode").pod


def test_a_group_may_ask_for_a_rack_of_its_own(render: Render) -> None:
    term = {"matchExpressions": [{"key": "disk", "operator": "Exists"}]}
    rule = {"nodeSelectorTerms": [term]}
    own = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": rule}}
    changes = {"groups": {"topologyKey": "rack", "exclusive": True}, "affinity": own}
    pool = pool_of(render("multinode", values={"decode": changes}), "decode")
    annotations = pool.workload["metadata"]["annotations"]
    assert annotations == {"leaderworkerset.sigs.k8s.io/exclusive-topology": "rack"}
    assert pool.pod["affinity"].keys() == {"nodeAffinity", "podAffinity"}
    assert pool.pod["affinity"].items() >= own.items()


@pytest.mark.parametrize(("section", "kind"), [("downloads", "Job"), ("helmTest", "Pod")])
def test_pods_of_no_pool_run_where_pools_do_or_where_they_are_told(
    section: str, kind: str, render: Render
) -> None:
    def placed(**changes: Any) -> dict[str, Any]:
        found = [t for w, t in workloads(render("pd", values=changes)) if w["kind"] == kind]
        (template,) = found
        return {key: template["spec"].get(key) for key in everywhere}

    everywhere = {
        "nodeSelector": {"zone": "a"},
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
        "priorityClassName": "inference",
    }
    own = {"nodeSelector": {"cpu": "yes"}, "tolerations": [{"key": "cpu"}]}
    assert placed(poolDefaults=everywhere) == everywhere
    assert placed(poolDefaults=everywhere, **{section: own}) == {**everywhere, **own}


def test_of_two_variables_of_one_name_the_last_wins(render: Render) -> None:
    """The API server refuses duplicates when Helm 4 applies them, and half is installed then."""

    def proxy(value: str) -> dict[str, Any]:
        return {"env": [{"name": "HTTPS_PROXY", "value": value}]}

    own = [{"name": "HOME", "value": "/other"}, {"name": "HOME", "value": "/home/me"}]
    manifests = render(
        "pd",
        values={
            "downloads": proxy("http://all"),
            "models": {"llama": proxy("http://llama")},
            "decode": {"env": own},
        },
    )
    assert broken_rules(manifests, secrets=["hugging-face"]) == []
    (job,) = objects(manifests, "Job")
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert {"name": "HTTPS_PROXY", "value": "http://llama"} in container["env"]
    assert pool_of(manifests, "decode").environment["HOME"] == "/home/me"


# ---- Pod Security


def beyond_restricted(spec: dict[str, Any]) -> Iterator[str]:
    """What of a pod the level *restricted* doesn't allow; the parts that a chart may set."""
    security = spec["securityContext"]
    if not security["runAsNonRoot"] or not security["runAsUser"]:
        yield "root"
    if security["seccompProfile"]["type"] != "RuntimeDefault":
        yield "seccomp"
    if any(spec.get(name) for name in ("hostNetwork", "hostPID", "hostIPC")):
        yield "host namespaces"
    allowed = {
        "configMap",
        "emptyDir",
        "ephemeral",
        "persistentVolumeClaim",
        "projected",
        "secret",
        "image",
    }
    for volume in spec["volumes"]:
        yield from (f"volume {kind}" for kind in volume.keys() - {"name"} - allowed)
    for container in (*spec.get("initContainers", ()), *spec["containers"]):
        own = container["securityContext"]
        if own["allowPrivilegeEscalation"] or own["capabilities"]["drop"] != ["ALL"]:
            yield f"{container['name']}: privileges"
        if not own["readOnlyRootFilesystem"]:
            yield f"{container['name']}: writable root"
        yield from own["capabilities"].get("add", ())


@pytest.mark.parametrize("name", values_files())
def test_every_pod_is_restricted_but_for_rdma(name: str, render: Render) -> None:
    for workload, template in workloads(render(name)):
        pinned = "rdma/hca" in template["spec"]["containers"][0]["resources"].get("limits", {})
        assert list(beyond_restricted(template["spec"])) == (["IPC_LOCK"] if pinned else []), (
            workload
        )
        assert template["spec"]["enableServiceLinks"] is False


def test_rdma_devices_are_for_workers(render: Render) -> None:
    """As the comment in values-pd.yaml says."""
    comment = (CHART / "values-pd.yaml").read_text(encoding="utf-8")
    (written,) = re.findall(r"#   (rdma: .*)", comment)
    manifests = render("pd", values={"poolDefaults": yaml.safe_load(written)})
    for pool in rendered_pools(manifests):
        asked = "rdma/hca" in pool.container["resources"]["limits"]
        added = "add" in pool.container["securityContext"]["capabilities"]
        assert (asked, added) == ((False, False) if pool.role == "processor" else (True, True))


def test_rdma_has_a_restricted_form_and_one_as_root(render: Render) -> None:
    def beyond(**rdma: bool) -> list[str]:
        values = {"poolDefaults": {"rdma": {"enabled": True, **rdma}}, "decode": {"pools": {}}}
        return list(beyond_restricted(pool_of(render("single-gpu", values=values), "decode").pod))

    assert beyond(ipcLock=False) == []
    assert beyond(runAsRoot=True) == ["root", "IPC_LOCK"]


def test_only_a_processor_that_watches_endpoint_slices_has_a_token(render: Render) -> None:
    by_dns = {"discovery": {"kind": "dns", "dnsTtlSeconds": 5}}
    renders = [(render(name), True) for name in values_files()]
    for manifests, watches in [*renders, (render("pd", values=by_dns), False)]:
        assert bool(objects(manifests, "Role")) is watches
        for workload, template in workloads(manifests):
            component = workload["metadata"]["labels"]["app.kubernetes.io/component"]
            expected = watches and component == "processor"
            assert template["spec"]["automountServiceAccountToken"] is expected
    (role,) = objects(render("all"), "Role")
    assert role["rules"] == [
        {
            "apiGroups": ["discovery.k8s.io"],
            "resources": ["endpointslices"],
            "verbs": ["get", "list", "watch"],
        }
    ]


# ---- TLS


def test_certificates_follow_the_graph_of_roles(render: Render) -> None:
    manifests = render("all")
    names = {
        one["metadata"]["labels"]["app.kubernetes.io/component"]: one["spec"]["dnsNames"]
        for one in objects(manifests, "Certificate")
    }
    graph = {"encode": {"processor", "prefill", "decode"}}
    processor = pool_of(manifests, "processor").config
    for pool in rendered_pools(manifests):
        if pool.role == "processor":
            assert "allowed_peers" not in pool.config
            continue
        # Only the roles that may call have a name that is let in.
        callers = {
            role for role, own in names.items() if set(own) & set(pool.config["allowed_peers"])
        }
        assert callers == graph.get(pool.role, {"processor"})
        assert processor["worker_tls_name"] in names[pool.role]
        headless = "x.suite-millstream-workers.inference.svc"
        assert any(fnmatch(headless, pattern) for pattern in names[pool.role])
        if pool.role in {"prefill", "decode"}:
            assert pool.config["encode_tls_name"] in names["encode"]
    for name in ("suite-millstream-processor.inference.svc", "millstream.example.com", "localhost"):
        assert name in names["processor"]


# ---- services and rollouts


def test_services_say_their_protocol(render: Render) -> None:
    for name, protocol in (("pd", "kubernetes.io/h2c"), ("all", "https")):
        ports = [port for one in objects(render(name), "Service") for port in one["spec"]["ports"]]
        protocols = {port.get("appProtocol") for port in ports if port["name"] == "grpc"}
        assert protocols == {protocol}


def test_upgrades_keep_capacity_unless_told_otherwise(render: Render) -> None:
    for pool in rendered_pools(render("epd")):
        rolling = pool.workload["spec"]["strategy"]["rollingUpdate"]
        assert rolling == {"maxSurge": 1, "maxUnavailable": 0}
        # A rollout isn't called failed while a pod may still load, or drain.
        limit = pool.workload["spec"]["progressDeadlineSeconds"]
        probe = pool.container["startupProbe"]
        assert limit > probe["failureThreshold"] * probe["periodSeconds"]
