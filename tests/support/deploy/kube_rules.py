"""What an API server or a cluster would refuse in objects that fit their schemas.

Names and labels too long, selectors that match nothing or another's pods, volumes, ports and
objects that are named and don't exist.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tests.support.deploy.deploy_tools import Manifest, objects

_LABEL = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
_SUBDOMAIN = re.compile(
    r"(?=.{1,253}$)[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*"
)
_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
_PORT_NAME_LENGTH = 15
# A pod's name is its workload's and 17 more characters at most; it is a label's value too.
_WORKLOAD_NAME_LENGTH = 46
_CLAIM = "persistentVolumeClaim"
_WORKLOADS = ("Deployment", "LeaderWorkerSet", "Job", "Pod")
Labels = Mapping[str, str]


def workloads(manifests: Sequence[Manifest]) -> Iterator[tuple[Manifest, dict[str, Any]]]:
    """List the objects that make pods, each with its template of pods; of a group all."""
    for manifest in manifests:
        spec = manifest.get("spec", {})
        if manifest["kind"] == "Pod":
            yield manifest, manifest
        elif manifest["kind"] in {"Deployment", "Job"}:
            yield manifest, spec["template"]
        elif manifest["kind"] == "LeaderWorkerSet":
            group = spec["leaderWorkerTemplate"]
            for name in ("leaderTemplate", "workerTemplate"):
                if name in group:
                    yield manifest, group[name]


def broken_rules(manifests: Sequence[Manifest], secrets: Sequence[str] = ()) -> list[str]:
    """Say what is wrong; empty where nothing is.

    Args:
        manifests: all objects of one release.
        secrets: secrets that exist already, as the values say.
    """
    found = list(_duplicates(manifests))
    for manifest in manifests:
        found += _names(manifest)
    for workload, template in workloads(manifests):
        where = f"{workload['kind']} {workload['metadata']['name']}"
        parts = (*_template_names(template), *_pod(template["spec"]))
        parts += (*_references(template["spec"], manifests, secrets),)
        found += [f"{where}: {part}" for part in parts]
    return found + list(_selectors(manifests)) + list(_targets(manifests))


def _duplicates(manifests: Sequence[Manifest]) -> Iterator[str]:
    keys = Counter((m["apiVersion"], m["kind"], m["metadata"]["name"]) for m in manifests)
    yield from (f"{key} is there {count} times" for key, count in keys.items() if count > 1)


def _names(manifest: Manifest) -> Iterator[str]:
    kind, name = manifest["kind"], manifest["metadata"]["name"]
    pattern = _LABEL if kind == "Service" else _SUBDOMAIN
    if not pattern.fullmatch(name):
        yield f"{kind} {name}: not a name for it"
    if kind in _WORKLOADS and len(name) > _WORKLOAD_NAME_LENGTH:
        yield f"{kind} {name}: {len(name)} characters make names of pods too long"
    yield from (f"{kind} {name}: {text}" for text in _labels(manifest["metadata"]))


def _labels(metadata: Mapping[str, Any]) -> Iterator[str]:
    for key, value in metadata.get("labels", {}).items():
        if not isinstance(value, str) or not _LABEL_VALUE.fullmatch(value):
            yield f"label {key}: {value!r} isn't a value"


def _template_names(template: Mapping[str, Any]) -> Iterator[str]:
    yield from _labels(template["metadata"])


def _pod(spec: Mapping[str, Any]) -> Iterator[str]:
    containers = [*spec.get("initContainers", ()), *spec["containers"]]
    volumes = [volume["name"] for volume in spec.get("volumes", ())]
    yield from _twice("volume", volumes)
    yield from _twice("container", [container["name"] for container in containers])
    # The kubelet waits for ever for the second one.
    claims = [v["persistentVolumeClaim"]["claimName"] for v in spec["volumes"] if _CLAIM in v]
    yield from _twice("claim", claims)
    mounted = [mount["name"] for c in containers for mount in c.get("volumeMounts", ())]
    yield from (f"volume {name} isn't mounted" for name in set(volumes) - set(mounted))
    yield from (f"there is no volume {name}" for name in set(mounted) - set(volumes))
    ports = [port for container in spec["containers"] for port in container.get("ports", ())]
    yield from _twice("port", [port["name"] for port in ports])
    yield from _twice("port", [port["containerPort"] for port in ports])
    for port in ports:
        if len(port["name"]) > _PORT_NAME_LENGTH:
            yield f"port {port['name']}: longer than {_PORT_NAME_LENGTH} characters"
    for container in containers:
        yield from _container(container)


def _container(container: Mapping[str, Any]) -> Iterator[str]:
    yield from _twice("variable", [one["name"] for one in container.get("env", ())])
    mounts = container.get("volumeMounts", ())
    yield from _twice("mount", [mount["mountPath"].rstrip("/") for mount in mounts])
    # The runtime couldn't make the directory for the second mount.
    for outer, inner in itertools.permutations(mounts, 2):
        if outer.get("readOnly") and inner["mountPath"].startswith(outer["mountPath"] + "/"):
            yield f"mount {inner['mountPath']} is inside of one that is read-only"
    ports = {port["containerPort"] for port in container.get("ports", ())}
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        port = container.get(name, {}).get("grpc", {}).get("port")
        if port is not None and port not in ports:
            yield f"{name}: the container has no port {port}"


def _twice(what: str, names: Sequence[Any]) -> Iterator[str]:
    yield from (f"{what} {n} is there {k} times" for n, k in Counter(names).items() if k > 1)


def _references(
    spec: Mapping[str, Any], manifests: Sequence[Manifest], secrets: Sequence[str]
) -> Iterator[str]:
    there = {(m["kind"], m["metadata"]["name"]) for m in manifests}
    there |= {("Secret", name) for name in secrets}
    there |= {("Secret", m["spec"]["secretName"]) for m in objects(manifests, "Certificate")}
    for kind, name in _named(spec):
        if (kind, name) not in there:
            yield f"there is no {kind} {name}"


def _named(spec: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if spec.get("serviceAccountName", "default") != "default":
        yield "ServiceAccount", spec["serviceAccountName"]
    for volume in spec.get("volumes", ()):
        sources = [volume, *volume.get("projected", {}).get("sources", ())]
        for source in sources:
            if "configMap" in source:
                yield "ConfigMap", source["configMap"]["name"]
            if "secret" in source:
                yield "Secret", source["secret"].get("secretName") or source["secret"]["name"]
    for container in (*spec.get("initContainers", ()), *spec["containers"]):
        for variable in container.get("env", ()):
            source = variable.get("valueFrom", {})
            if "secretKeyRef" in source and not source["secretKeyRef"].get("optional"):
                yield "Secret", source["secretKeyRef"]["name"]


def _selectors(manifests: Sequence[Manifest]) -> Iterator[str]:
    pods = [(w["metadata"]["name"], t["metadata"]["labels"]) for w, t in workloads(manifests)]
    for manifest in manifests:
        where = f"{manifest['kind']} {manifest['metadata']['name']}"
        for selector in _selectors_of(manifest):
            selected = {name for name, labels in pods if selects(selector, labels)}
            if not selected:
                yield f"{where}: selects no pod"
            if manifest["kind"] == "Deployment" and selected != {manifest["metadata"]["name"]}:
                yield f"{where}: selects the pods of {sorted(selected)}"


def _selectors_of(manifest: Manifest) -> Iterator[Mapping[str, Any]]:
    kind, spec = manifest["kind"], manifest.get("spec", {})
    if kind == "Service" and spec.get("selector"):
        yield {"matchLabels": spec["selector"]}
    elif kind in {"Deployment", "PodDisruptionBudget", "PodMonitor"}:
        yield spec["selector"]
    elif kind == "NetworkPolicy":
        yield spec["podSelector"]
    elif kind == "InferencePool":
        yield spec["selector"]


def selects(selector: Mapping[str, Any], labels: Labels) -> bool:
    """Whether a selector selects pods with these labels."""
    wanted = selector.get("matchLabels", {})
    return all(labels.get(key) == value for key, value in wanted.items()) and all(
        _expression(expression, labels) for expression in selector.get("matchExpressions", ())
    )


def _expression(expression: Mapping[str, Any], labels: Labels) -> bool:
    key, values = expression["key"], expression.get("values", ())
    return {
        "In": labels.get(key) in values,
        "NotIn": labels.get(key) not in values,
        "Exists": key in labels,
        "DoesNotExist": key not in labels,
    }[str(expression["operator"])]


def _targets(manifests: Sequence[Manifest]) -> Iterator[str]:
    there = {(m["kind"], m["metadata"]["name"]) for m in manifests}
    for manifest in manifests:
        target = manifest.get("spec", {}).get("scaleTargetRef")
        if target and (target.get("kind", "Deployment"), target["name"]) not in there:
            yield f"{manifest['kind']} {manifest['metadata']['name']}: there is no {target}"
    for service in objects(manifests, "Service"):
        yield from _service_ports(service, manifests)


def _service_ports(service: Manifest, manifests: Sequence[Manifest]) -> Iterator[str]:
    selector = {"matchLabels": service["spec"].get("selector", {})}
    for workload, template in workloads(manifests):
        if not selects(selector, template["metadata"]["labels"]):
            continue
        ports = [p for c in template["spec"]["containers"] for p in c.get("ports", ())]
        there = {port[key] for port in ports for key in ("name", "containerPort")}
        for port in service["spec"]["ports"]:
            if port.get("targetPort", port["port"]) not in there:
                name = workload["metadata"]["name"]
                yield f"Service {service['metadata']['name']}: {name} has no port {port}"
