"""The pool of HTTP doors: what it calls, who calls it, where gateways lead HTTP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.support.deploy.deploy_tools import Helm, Manifest, RenderError, merged, objects
from tests.support.deploy.network_policies import End, allowed
from tests.support.deploy.rendered_pools import pool_of

Render = Callable[..., list[Manifest]]
ON: dict[str, Any] = {
    "models": {"m": {"uri": "pvc://claim/m"}},
    "decode": {"enabled": True, "pools": {"main": {"model": "m"}}},
    "door": {"enabled": True},
}
TLS = {"security": {"tls": {"enabled": True, "existingSecret": "certificates"}}}
GATEWAY: dict[str, Any] = {
    "gateway": {
        "route": {
            "enabled": True,
            "backendTls": False,
            "parentRefs": [{"name": "public"}],
            "http": {"enabled": True},
        },
        "ingress": {"enabled": True, "host": "llm.example.com"},
    }
}


def _backend(route: Manifest) -> str:
    ((rule,),) = (route["spec"]["rules"],)
    ((backend,),) = (rule["backendRefs"],)
    return f"{backend['name']}:{backend['port']}"


def test_it_calls_the_releases_processors(render: Render) -> None:
    door = pool_of(render(values=ON), "door")
    (processors,) = door.config["processors"]
    assert processors.startswith("dns:")
    assert "-processors." in processors
    assert door.container["args"][:3] == ["python", "-m", "millstream_server.door"]
    assert not door.pod["automountServiceAccountToken"]
    mounted = {mount["mountPath"] for mount in door.container["volumeMounts"]}
    assert mounted == {"/etc/millstream/config.yaml", "/tmp", "/home/millstream"}  # noqa: S108


def test_gateways_lead_http_to_it_and_grpc_to_the_processor(render: Render) -> None:
    manifests = render(values=merged(ON, GATEWAY))
    (grpc,), (http,) = objects(manifests, "GRPCRoute"), objects(manifests, "HTTPRoute")
    assert _backend(grpc).endswith("-processor:50051")
    assert _backend(http).endswith("-door:80")
    (ingress,) = objects(manifests, "Ingress")
    ((path,),) = (ingress["spec"]["rules"][0]["http"]["paths"],)
    service = path["backend"]["service"]
    assert service["name"].endswith("-door")
    (found,) = (
        s for s in objects(manifests, "Service") if s["metadata"]["name"] == service["name"]
    )
    assert [port["name"] for port in found["spec"]["ports"]] == [service["port"]["name"]]


def test_processors_may_serve_grpc_alone(render: Render) -> None:
    """Without a door that contradicts the HTTPRoute."""
    alone = {"processor": {"settings": {"http": False}}}
    manifests = render(values=merged(ON, GATEWAY, alone))
    assert pool_of(manifests, "processor").config["http"] is False
    (http,) = objects(manifests, "HTTPRoute")
    assert _backend(http).endswith("-door:80")


def test_it_is_ready_when_a_processor_serves_its_only_model(render: Render) -> None:
    """Of several models, one without workers must not take the others away."""
    second = {
        "models": {"n": {"uri": "pvc://claim/n"}},
        "decode": {"pools": {"second": {"model": "n"}}},
    }
    for more, service in (({}, ""), (second, "accepting")):
        container = pool_of(render(values=merged(ON, more)), "door").container
        assert container["readinessProbe"]["grpc"]["service"] == service
        assert container["startupProbe"]["grpc"]["service"] == "liveness"


def test_the_processor_lets_it_in_by_its_certificate(render: Render) -> None:
    clients = {"requireClientCertificates": True, "allowedClients": ["client.example.com"]}
    manifests = render(values=merged(ON, TLS, {"security": {"tls": clients}}))
    door, processor = pool_of(manifests, "door"), pool_of(manifests, "processor")
    (own,) = set(processor.config["allowed_peers"]) - set(door.config["allowed_peers"])
    assert "-door." in own
    assert door.config["allowed_peers"] == clients["allowedClients"]
    assert "-processor." in door.config["processor_tls_name"]


def test_it_reaches_processors_and_no_worker(render: Render) -> None:
    manifests = render(values=ON)
    namespace = manifests[0]["metadata"]["namespace"]
    ends = {
        role: End(
            role, f"10.2.0.{i}", namespace, pool_of(manifests, role).template["metadata"]["labels"]
        )
        for i, role in enumerate(("door", "processor", "decode"), 1)
    }
    client = End("a client", "10.1.0.1", namespace, {"app": "chat"})

    def reaches(source: End, target: End) -> bool:
        return allowed(objects(manifests, "NetworkPolicy"), source, target, 50051)

    assert reaches(client, ends["door"])
    assert reaches(ends["door"], ends["processor"])
    assert not reaches(ends["door"], ends["decode"])
    assert not reaches(ends["processor"], ends["door"])


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"processor": {"enabled": False}}, "no Processor that it could call"),
        ({"door": {"gpu": {"resource": "nvidia.com/gpu"}}}, "the door has no model, GPU"),
        ({"door": {"settings": {"processors": ["a:1"]}}}, "it is this release's Processors"),
        ({"door": {"settings": {"max_pace_s": 1}}}, "door has no such setting"),
        ({"door": {"service": {"nodePort": 30000}}}, "door.service.nodePort is set"),
        (merged(TLS, {"security": {"tls": {"clientFacingSecret": "public"}}}), "another CA"),
    ],
)
def test_mistakes(helm4: Helm, values: dict[str, Any], says: str) -> None:
    with pytest.raises(RenderError, match=says):
        helm4.template(values=merged(ON, values))
