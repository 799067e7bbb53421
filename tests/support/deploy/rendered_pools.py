"""The pools of a rendered release: their workloads, pods and configuration files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from tests.support.deploy.deploy_tools import Manifest, objects

ROLES = ("processor", "encode", "prefill", "decode", "diffusion", "embedding")


@dataclass(frozen=True)
class RenderedPool:
    """A Deployment or LeaderWorkerSet, and the file that its pods read."""

    workload: Manifest
    config: dict[str, Any]

    @property
    def role(self) -> str:
        return str(self.workload["metadata"]["labels"]["app.kubernetes.io/component"])

    @property
    def name(self) -> str:
        return str(self.workload["metadata"]["name"])

    @property
    def template(self) -> dict[str, Any]:
        """The template of its pods; of a group that of the first."""
        spec: dict[str, Any] = self.workload["spec"]
        group = spec.get("leaderWorkerTemplate")
        template: dict[str, Any] = group["leaderTemplate"] if group else spec["template"]
        return template

    @property
    def follower(self) -> dict[str, Any]:
        """The template of a group's other pods."""
        template: dict[str, Any] = self.workload["spec"]["leaderWorkerTemplate"]["workerTemplate"]
        return template

    @property
    def pod(self) -> dict[str, Any]:
        spec: dict[str, Any] = self.template["spec"]
        return spec

    @property
    def container(self) -> dict[str, Any]:
        (container,) = self.pod["containers"]
        found: dict[str, Any] = container
        return found

    @property
    def environment(self) -> dict[str, str]:
        """Its variables that have values; what the cluster fills in is left out."""
        return {one["name"]: one["value"] for one in self.container["env"] if "value" in one}


def rendered_pools(manifests: Sequence[Manifest]) -> list[RenderedPool]:
    """List the pools of a release, the Processor's too."""
    return list(_pools(manifests))


def pool_of(manifests: Sequence[Manifest], role: str, name: str = "main") -> RenderedPool:
    """Find one pool."""
    (found,) = (
        pool
        for pool in _pools(manifests)
        if pool.role == role and pool.workload["metadata"]["labels"]["millstream.io/pool"] == name
    )
    return found


def _pools(manifests: Sequence[Manifest]) -> Iterator[RenderedPool]:
    files = {
        one["metadata"]["name"]: one["data"]["config.yaml"]
        for one in objects(manifests, "ConfigMap")
        if "config.yaml" in one["data"]
    }
    for manifest in manifests:
        if manifest["kind"] in {"Deployment", "LeaderWorkerSet"}:
            config = yaml.safe_load(files[manifest["metadata"]["name"]])
            yield RenderedPool(manifest, config)
