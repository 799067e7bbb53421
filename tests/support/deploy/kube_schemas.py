"""Check Kubernetes objects without a cluster: against the schemas of its versions and of CRDs."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match
from referencing import Registry, Resource

from tests.support.deploy.crd_schemas import SCHEMAS as CRD_SCHEMAS
from tests.support.deploy.deploy_tools import SCHEMAS, Manifest


class KubeSchemas:
    """The strict schemas of one version of Kubernetes, and those of custom resources."""

    def __init__(self, version: str) -> None:
        text = (SCHEMAS / f"kubernetes-{version}.json").read_text(encoding="utf-8")
        definitions = json.loads(text)
        kinds = {
            "/".join(filter(None, (kind["group"], kind["version"], kind["kind"]))): name
            for name, schema in definitions["$defs"].items()
            for kind in schema.get("x-kubernetes-group-version-kind", ())
        }
        self._schemas: dict[str, Any] = {
            kind: {"$ref": f"{definitions['$id']}#/$defs/{name}"} for kind, name in kinds.items()
        }
        self._schemas |= json.loads(CRD_SCHEMAS.read_text(encoding="utf-8"))
        resource: Resource[Any] = Resource.from_contents(definitions)
        self._registry: Registry[Any] = resource @ Registry()

    def problems(self, manifest: Manifest) -> Iterator[str]:
        """Say what is wrong with an object: at most one sentence, the most telling one."""
        kind = f"{manifest['apiVersion']}/{manifest['kind']}"
        name = f"{manifest['kind']} {manifest['metadata'].get('name')}"
        if kind not in self._schemas:
            yield f"{name}: there is no {kind}"
            return
        validator = Draft202012Validator(self._schemas[kind], registry=self._registry)
        error = best_match(validator.iter_errors(manifest))
        if error is not None:
            path = ".".join(map(str, error.absolute_path))
            yield f"{name}: {path}: {error.message}"


@functools.cache
def kube_schemas(version: str) -> KubeSchemas:
    """Read the schemas of a version, such as "1.30", once."""
    return KubeSchemas(version)
