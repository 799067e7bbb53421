"""Write tests/support/deploy/crd_schemas.json: what the fields of others' custom resources may be.

    python -m tests.support.deploy.crd_schemas FILE...

The files are the CustomResourceDefinitions as these projects publish them, all under the Apache
licence 2.0; of each the newest version that is served is taken, without texts and status:

- LeaderWorkerSet 0.10: config/crd/bases/leaderworkerset.x-k8s.io_leaderworkersets.yaml
- cert-manager 1.21: deploy/crds/cert-manager.io_certificates.yaml
- Prometheus operator 0.93: example/prometheus-operator-crd/monitoring.coreos.com_{podmonitors,
  prometheusrules}.yaml
- KEDA 2.20: config/crd/bases/keda.sh_{scaledobjects,triggerauthentications}.yaml
- Gateway API 1.6: config/crd/standard/gateway.networking.k8s.io_{grpcroutes,
  httproutes,backendtlspolicies}.yaml
- its inference extension 1.6: config/crd/bases/inference.networking.k8s.io_inferencepools.yaml

Rules in CEL aren't checked by anything here: only an API server does.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

SCHEMAS = Path(__file__).with_suffix(".json")
# Where a template of pods stands, Kubernetes' own schema is better, and shorter.
POD_TEMPLATE = {
    "$ref": "https://kubernetes.io/api/_definitions.json#/$defs/io.k8s.api.core.v1.PodTemplateSpec"
}
_POD_TEMPLATE_FIELDS = {"metadata", "spec"}
_KEPT = (
    "type",
    "enum",
    "required",
    "minimum",
    "maximum",
    "minLength",
    "maxLength",
    "minItems",
    "maxItems",
    "minProperties",
    "maxProperties",
    "pattern",
)


def condense(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Keep of a structural schema what decides whether a value is right; close its objects."""
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    kept = {key: schema[key] for key in _KEPT if key in schema}
    if schema.get("nullable") and "type" in kept:
        kept["type"] = [kept["type"], "null"]
    if "items" in schema:
        kept["items"] = condense(schema["items"])
    properties = schema.get("properties", {})
    if _is_pod_template(properties):
        return POD_TEMPLATE
    if properties:
        kept["properties"] = {name: condense(field) for name, field in properties.items()}
    others = schema.get("additionalProperties")
    if isinstance(others, Mapping):
        kept["additionalProperties"] = condense(others)
    elif properties and not schema.get("x-kubernetes-preserve-unknown-fields"):
        kept["additionalProperties"] = False
    return kept


def _is_pod_template(properties: Mapping[str, Any]) -> bool:
    if set(properties) != _POD_TEMPLATE_FIELDS:
        return False
    return "containers" in properties["spec"].get("properties", {})


def read(definition: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Read a definition; returns "group/version/Kind" and the schema of such an object."""
    spec = definition["spec"]
    served = [version for version in spec["versions"] if version["served"]]
    version = max(served, key=lambda version: bool(version["storage"]))
    schema = version["schema"]["openAPIV3Schema"]
    fields = {
        name: condense(field) for name, field in schema["properties"].items() if name != "status"
    }
    fields["metadata"] = {
        "$ref": POD_TEMPLATE["$ref"].partition("#")[0]
        + "#/$defs/io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta"
    }
    whole = {"type": "object", "properties": fields, "additionalProperties": False}
    whole["required"] = ["apiVersion", "kind", "metadata", *schema.get("required", ())]
    return f"{spec['group']}/{version['name']}/{spec['names']['kind']}", whole


def main(*files: str) -> None:
    """Write the schemas of all files."""
    definitions = [
        document
        for file in files
        for document in yaml.safe_load_all(Path(file).read_text(encoding="utf-8"))
        if document and document["kind"] == "CustomResourceDefinition"
    ]
    found = dict(sorted(map(read, definitions)))
    lines = (f"{json.dumps(name)}: {json.dumps(schema)}" for name, schema in found.items())
    SCHEMAS.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
