"""A route and a pool of Processors for gateways."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from millstream_server.processor.app import SERVICES
from tests.support.deploy.deploy_tools import (
    KUBERNETES,
    Helm,
    Manifest,
    RenderError,
    merged,
    objects,
)

Render = Callable[..., list[Manifest]]
ON: dict[str, Any] = {
    "models": {"m": {"uri": "pvc://claim/m"}},
    "decode": {"enabled": True, "pools": {"main": {"model": "m"}}},
    "gateway": {
        "route": {"enabled": True, "parentRefs": [{"name": "public", "namespace": "gateways"}]},
        "inferencePool": {"enabled": True, "endpointPicker": {"name": "picker"}},
    },
}


def test_the_route_leads_to_the_processors_service(render: Render) -> None:
    manifests = render(values=ON)
    (route,) = objects(manifests, "GRPCRoute")
    (rule,) = route["spec"]["rules"]
    (backend,) = rule["backendRefs"]
    services = {
        service["metadata"]["name"]: service["spec"] for service in objects(manifests, "Service")
    }
    assert backend["port"] in {port["port"] for port in services[backend["name"]]["ports"]}
    assert services[backend["name"]].get("clusterIP") != "None"
    names = {match["method"]["service"] for match in rule["matches"]}
    assert names == {
        *SERVICES,
        "grpc.health.v1.Health",
        "grpc.reflection.v1.ServerReflection",
        "grpc.reflection.v1alpha.ServerReflection",
    }


def test_the_http_route_leads_there_too_without_a_time_limit(render: Render) -> None:
    values = {"gateway": {"route": {"http": {"enabled": True, "paths": ["/v1", "/tokenize"]}}}}
    manifests = render(values=merged(ON, values))
    (grpc,), (http,) = objects(manifests, "GRPCRoute"), objects(manifests, "HTTPRoute")
    (of_grpc,), (rule,) = grpc["spec"]["rules"], http["spec"]["rules"]
    assert rule["backendRefs"] == of_grpc["backendRefs"]
    assert http["spec"]["parentRefs"] == grpc["spec"]["parentRefs"]
    assert [match["path"]["value"] for match in rule["matches"]] == ["/v1", "/tokenize"]
    assert rule["timeouts"] == {"request": "0s"}
    assert not objects(render(values=ON), "HTTPRoute")


def test_an_ingress_leads_to_the_processors_service(
    render: Render, kube_validate: Callable[[Sequence[Manifest], str], None]
) -> None:
    grpc = {"nginx.ingress.kubernetes.io/backend-protocol": "GRPC"}
    values = {
        "enabled": True,
        "className": "nginx",
        "host": "chat.example.com",
        "tlsSecret": "chat-tls",
        "annotations": grpc,
    }
    manifests = render(values=merged(ON, {"gateway": {"ingress": values}}))
    kube_validate(manifests, KUBERNETES[-1])
    (ingress,) = objects(manifests, "Ingress")
    assert ingress["metadata"]["annotations"] == grpc
    (rule,) = ingress["spec"]["rules"]
    backend = rule["http"]["paths"][0]["backend"]["service"]
    (service,) = (s for s in objects(manifests, "Service") if named(s) == backend["name"])
    assert backend["port"]["name"] in {port["name"] for port in service["spec"]["ports"]}
    assert ingress["spec"]["tls"] == [{"hosts": [rule["host"]], "secretName": "chat-tls"}]


def named(manifest: Manifest) -> str:
    return str(manifest["metadata"]["name"])


def test_the_inference_pool_is_of_processors(render: Render) -> None:
    manifests = render(values=ON)
    (pool,) = objects(manifests, "InferencePool")
    spec = pool["spec"]
    selected = [
        deployment["metadata"]["labels"]["app.kubernetes.io/component"]
        for deployment in objects(manifests, "Deployment")
        if spec["selector"]["matchLabels"].items()
        <= deployment["spec"]["template"]["metadata"]["labels"].items()
    ]
    assert selected == ["processor"]
    assert spec["targetPorts"] == [{"number": 50051}]
    picker = {"name": "picker", "port": {"number": 9002}, "failureMode": "FailOpen"}
    assert spec["endpointPickerRef"] == picker
    assert "appProtocol" not in spec
    change = {"gateway": {"inferencePool": {"h2c": True}}}
    (told,) = objects(render(values=merged(ON, change)), "InferencePool")
    assert told["spec"]["appProtocol"] == "kubernetes.io/h2c"


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"gateway": {"ingress": {"enabled": True}}}, "gateway.ingress.host is empty"),
        ({"gateway": {"route": {"parentRefs": []}}}, "gateway.route.parentRefs is empty"),
        (
            {"gateway": {"route": {"enabled": False, "http": {"enabled": True}}}},
            "gateway.route.http.enabled is true, and gateway.route.enabled isn't",
        ),
        (
            {
                "gateway": {"route": {"http": {"enabled": True}}},
                "processor": {"settings": {"http": False}},
            },
            "and processor.settings.http is false",
        ),
        (
            {"gateway": {"inferencePool": {"endpointPicker": {"name": ""}}}},
            "name the service of the endpoint picker",
        ),
        (
            {"security": {"tls": {"enabled": True, "certManager": {"issuerRef": {"name": "ca"}}}}},
            "the Processor serves with TLS; make a BackendTLSPolicy",
        ),
        ({"processor": {"enabled": False}}, "and the Processor isn't; set processor.enabled=true"),
    ],
)
def test_mistakes_are_refused(values: dict[str, Any], sentence: str, helm4: Helm) -> None:
    with pytest.raises(RenderError, match=re.escape(sentence)):
        helm4.text(values=merged(ON, values))


@pytest.mark.parametrize("kind", ["GRPCRoute", "InferencePool"])
def test_a_cluster_without_the_resource_is_told(kind: str, helm4: Helm) -> None:
    with pytest.raises(RenderError, match=f"the cluster has no {kind}; install"):
        helm4.text(values=ON, apis=())
