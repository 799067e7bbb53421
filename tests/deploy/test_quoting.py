"""Names that look like other YAML types, and values with YAML's characters, stay what they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.deploy.deploy_tools import Helm, Manifest

Render = Callable[..., list[Manifest]]
HOSTILE = 'a"}, evil: {b: c}\nevil: "{{ .Release.Name }} # \''


def mappings(value: Any) -> Iterator[dict[str, Any]]:
    """Yield every mapping in a value, at any depth."""
    if isinstance(value, dict):
        yield value
    if isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from mappings(part)


def test_names_that_yaml_would_take_for_numbers_or_booleans(
    render: Render, kube_validate: Callable[..., None]
) -> None:
    manifests = render(
        values={
            "nameOverride": "1",
            "fullnameOverride": "true",
            "models": {
                "1": {"uri": "pvc://claim/a"},
                "1e3": {"uri": "hf://org/a", "download": "job", "size": "1Gi"},
            },
            "decode": {"enabled": True, "pools": {"true": {"model": "1"}, "0": {"model": "1e3"}}},
            "image": {"processor": {"tag": "1"}, "worker": {"tag": "1"}},
            "security": {"ticketKey": {"existingSecret": "1", "key": "1"}},
        }
    )
    kube_validate(manifests)
    for mapping in (found for manifest in manifests for found in mappings(manifest)):
        for name in ("labels", "matchLabels", "metadata"):
            values = {key: v for key, v in mapping.get(name, {}).items() if key != "annotations"}
            assert {type(v) for key, v in values.items() if key != "labels"} <= {str}


def test_models_with_similar_names_have_volumes_of_their_own(render: Render) -> None:
    uris = {key: {"uri": f"pvc://claim/{key}"} for key in ("a.b", "a-b")}
    pools = {"one": {"model": "a.b"}, "two": {"model": "a-b"}}
    for manifest in render(values={"models": uris, "decode": {"enabled": True, "pools": pools}}):
        if manifest["kind"] == "Deployment":
            names = [each["name"] for each in manifest["spec"]["template"]["spec"]["volumes"]]
            assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    "values",
    [
        {"decode": {"priorityClassName": HOSTILE, "runtimeClassName": HOSTILE}},
        {"decode": {"settings": {"profile_dir": HOSTILE}}},
        {"decode": {"engineArgs": {"lora_target_modules": [HOSTILE], "kv_cache_dtype": HOSTILE}}},
        {"decode": {"env": [{"name": "A", "value": HOSTILE}], "podAnnotations": {"a": HOSTILE}}},
        {"serviceAccount": {"create": False, "name": HOSTILE, "processorName": HOSTILE}},
        {"security": {"ticketKey": {"existingSecret": HOSTILE}}},
        {"security": {"apiKeys": {"enabled": True, "existingSecret": HOSTILE}}},
        {"models": {"qwen": {"storageClass": HOSTILE, "size": "1Gi"}}},
        {"models": {"qwen": {"tokenSecret": {"name": HOSTILE}}}},
        {"monitoring": {"dashboards": {"enabled": True, "namespace": HOSTILE}}},
        {"discovery": {"extraWorkers": [HOSTILE]}, "networkPolicy": {"enabled": False}},
        {
            "security": {
                "tls": {
                    "enabled": True,
                    "existingSecret": HOSTILE,
                    "clientFacingSecret": HOSTILE,
                    "clientCaSecret": HOSTILE,
                    "requireClientCertificates": True,
                    "allowedClients": [HOSTILE],
                    "workerName": HOSTILE,
                    "identities": {"processor": HOSTILE},
                }
            }
        },
        {
            "security": {
                "tls": {
                    "enabled": True,
                    "certManager": {
                        "issuerRef": {"name": HOSTILE, "group": HOSTILE},
                        "duration": HOSTILE,
                        "renewBefore": HOSTILE,
                    },
                    "dnsNames": [HOSTILE],
                }
            }
        },
    ],
)
def test_a_value_stays_where_it_belongs(values: dict[str, Any], helm4: Helm) -> None:
    manifests = helm4.template("single-gpu", values=values)
    assert not any("evil" in mapping for one in manifests for mapping in mappings(one))
    assert "evil" in str(manifests)
