"""checkov finds nothing in the rendered examples but what deploy/helm/policy.yaml excuses.

It doesn't know LeaderWorkerSets: each template of pods in one is shown to it as a Deployment.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import yaml

from tests.support.deploy.deploy_tools import CHART, Manifest, tool, values_files
from tests.support.deploy.kube_rules import workloads

POLICY = CHART.parent / "policy.yaml"


BARE = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {"name": "bare", "namespace": "inference"},
    "spec": {"containers": [{"name": "main", "image": "main:1"}]},
}
"""A pod without any restriction, to see that the scanner finds what it should."""
Failed = set[tuple[str, str]]


@pytest.fixture(scope="module")
def failed(
    render: Callable[..., list[Manifest]], tmp_path_factory: pytest.TempPathFactory
) -> Failed:
    """Scan all examples and the bare pod at once: the scanner's start takes longest."""
    folder = tmp_path_factory.mktemp("manifests")
    for name in values_files():
        manifests = list(scannable(render(name)))
        (folder / f"{name}.yaml").write_text(yaml.safe_dump_all(manifests), encoding="utf-8")
    (folder / "bare.yaml").write_text(yaml.safe_dump(BARE), encoding="utf-8")
    return set(failed_checks(folder))


def test_each_failed_check_has_a_reason_and_each_reason_a_failed_check(failed: Failed) -> None:
    reasons = yaml.safe_load(POLICY.read_text(encoding="utf-8"))["exceptions"]
    ours = {(check, name) for check, name in failed if name != "Pod/bare"}
    used = [
        {(check, name) for check, name in ours if excuses(entry, check, name)} for entry in reasons
    ]
    without = sorted(f"{check} {name}" for check, name in ours - set().union(*used))
    assert not without, "no reason in policy.yaml for:\n" + "\n".join(without)
    assert [entry for entry, checks in zip(reasons, used, strict=True) if not checks] == []


def test_a_pod_without_restrictions_is_found(failed: Failed) -> None:
    found = {check.partition(" ")[0] for check, name in failed if name == "Pod/bare"}
    assert {"CKV_K8S_20", "CKV_K8S_22", "CKV_K8S_23", "CKV_K8S_28"} <= found


def excuses(entry: dict[str, str], check: str, name: str) -> bool:
    assert entry["reason"], entry
    return entry["check"] == check.partition(" ")[0] and bool(re.fullmatch(entry["objects"], name))


def scannable(manifests: Sequence[Manifest]) -> Iterator[Manifest]:
    yield from (m for m in manifests if m["kind"] != "LeaderWorkerSet")
    for i, (group, template) in enumerate(workloads(manifests)):
        if group["kind"] == "LeaderWorkerSet":
            metadata = {**group["metadata"], "name": f"{group['metadata']['name']}-{i}"}
            spec = {"selector": {"matchLabels": template["metadata"]["labels"]}}
            yield {
                "apiVersion": "apps/v1",
                "kind": "Deployment",
                "metadata": metadata,
                "spec": {**spec, "template": template},
            }


def failed_checks(folder: Path) -> Iterator[tuple[str, str]]:
    """Scan a folder; returns "ID name of the check" and "Kind/name" of each failure."""
    command = [str(tool("checkov")), "--framework", "kubernetes", "--directory", str(folder)]
    ran = subprocess.run(
        [*command, "--skip-download", "--compact", "--output", "json"],
        capture_output=True,
        text=True,
        check=False,
    )
    report = json.loads(ran.stdout)
    assert report["summary"]["parsing_errors"] == 0, ran.stderr
    assert report["summary"]["resource_count"] > 0, ran.stderr
    for check in report["results"]["failed_checks"]:
        kind, _, name = check["resource"].split(".", 2)
        name = name.partition(".app.kubernetes.io")[0]  # some checks add the labels of pods
        yield f"{check['check_id']} {check['check_name']}", f"{kind}/{name}"
