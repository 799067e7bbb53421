"""How pods get their models: claims, jobs, volumes, tokenizers."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.deploy.deploy_tools import Helm, Manifest, RenderError, merged, objects
from tests.support.deploy.fake_api import render_on
from tests.support.deploy.kube_rules import broken_rules
from tests.support.deploy.rendered_pools import RenderedPool, pool_of

Render = Callable[..., list[Manifest]]
MAIN = hashlib.sha256(b"hf://meta-llama/Llama-3.3-70B-Instruct@main").hexdigest()[:12]
"""The directory of that revision in the model's claim."""


def name_of(manifests: list[Manifest], kind: str) -> str:
    (found,) = objects(manifests, kind)
    return str(found["metadata"]["name"])


def volume_at(pool: RenderedPool, path: str) -> dict[str, Any]:
    """Find what a pod mounts there, and whether it may write."""
    (mount,) = (one for one in pool.container["volumeMounts"] if one["mountPath"] == path)
    (volume,) = (one for one in pool.pod["volumes"] if one["name"] == mount["name"])
    rest = {key: part for key, part in volume.items() if key != "name"}
    return {**rest, **{key: mount[key] for key in ("readOnly", "subPath") if key in mount}}


def with_model(render: Render, **model: Any) -> list[Manifest]:
    return render("single-gpu", values={"models": {"qwen": {"revision": "", **model}}})


@pytest.mark.parametrize(
    ("change", "same_claim", "same_job"),
    [
        ({"processor": {"replicas": 3}}, True, True),
        ({"models": {"llama": {"size": "300Gi"}}}, True, True),
        ({"image": {"processor": {"tag": "0.2.0"}}}, True, False),
        ({"downloads": {"env": [{"name": "HF_ENDPOINT", "value": "http://hub"}]}}, True, False),
        ({"models": {"llama": {"revision": "v2"}}}, True, False),
        ({"models": {"llama": {"uri": "s3://bucket/llama", "revision": ""}}}, True, False),
        ({"models": {"llama": {"storageClass": "other"}}}, True, True),
        ({"models": {"llama": {"prune": True}}}, True, False),
    ],
)
def test_a_download_runs_again_only_for_other_files_or_another_pod(
    change: dict[str, Any], render: Render, *, same_claim: bool, same_job: bool
) -> None:
    before, after = render("pd"), render("pd", values=change)
    claim = "PersistentVolumeClaim"
    assert (name_of(before, claim) == name_of(after, claim)) is same_claim
    assert (name_of(before, "Job") == name_of(after, "Job")) is same_job
    if same_job:  # A Job's pods can't be changed: an upgrade with other ones would fail.
        jobs = [objects(one, "Job")[0]["spec"]["template"] for one in (before, after)]
        assert jobs[0] == jobs[1]


def test_a_rollback_finds_its_claim_and_its_files(render: Render) -> None:
    """Helm deletes at once what a version doesn't name, and can't roll back what it deleted."""
    change = {"models": {"llama": {"revision": "v2"}}}
    before, after = render("pd"), render("pd", values=change)
    kept = {one["metadata"]["name"] for one in objects(after, "PersistentVolumeClaim")}
    mounts = [volume_at(pool_of(one, "decode"), "/models/llama") for one in (before, after)]
    assert {one["persistentVolumeClaim"]["claimName"] for one in mounts} == kept
    assert mounts[0]["subPath"] != mounts[1]["subPath"]
    jobs = [objects(one, "Job")[0]["spec"]["template"]["spec"] for one in (before, after)]
    for job, mount in zip(jobs, mounts, strict=True):
        assert job["containers"][0]["args"][5] == f"/models/llama/{mount['subPath']}"
        assert "subPath" not in job["containers"][0]["volumeMounts"][-1]


def test_old_revisions_are_removed_when_told(render: Render) -> None:
    (job,) = objects(render("pd", values={"models": {"llama": {"prune": True}}}), "Job")
    assert job["spec"]["template"]["spec"]["containers"][0]["args"][6:] == ["--prune"]


def test_workers_wait_for_the_job_and_mount_its_claim(render: Render) -> None:
    manifests = render("pd")
    claim = name_of(manifests, "PersistentVolumeClaim")
    (job,) = objects(manifests, "Job")
    pod = job["spec"]["template"]["spec"]
    assert pod["containers"][0]["args"][3:] == [
        "fetch",
        "hf://meta-llama/Llama-3.3-70B-Instruct@main",
        f"/models/llama/{MAIN}",
    ]
    assert pod["volumes"][0]["persistentVolumeClaim"] == {"claimName": claim}
    token = {"secretKeyRef": {"name": "hugging-face", "key": "token"}}
    assert {"name": "HF_TOKEN", "valueFrom": token} in pod["containers"][0]["env"]
    for role in ("prefill", "decode"):
        pool = pool_of(manifests, role)
        assert volume_at(pool, "/models/llama") == {
            "persistentVolumeClaim": {"claimName": claim, "readOnly": True},
            "readOnly": True,
            "subPath": MAIN,
        }
        (wait,) = pool.pod["initContainers"]
        assert wait["args"][3:] == ["wait", f"/models/llama/{MAIN}"]
        assert wait["volumeMounts"][-1]["mountPath"] == "/models/llama"
        assert "subPath" not in wait["volumeMounts"][-1]
        assert pool.environment["HF_HUB_OFFLINE"] == "1"


@pytest.mark.parametrize(
    ("model", "volume"),
    [
        ({"size": "40Gi"}, {"emptyDir": {"sizeLimit": "40Gi"}, "readOnly": True}),
        (
            {"uri": "pvc://claim/path/to/qwen"},
            {
                "persistentVolumeClaim": {"claimName": "claim", "readOnly": True},
                "readOnly": True,
                "subPath": "path/to/qwen",
            },
        ),
        (
            {"uri": "oci://registry/qwen:1"},
            {
                "image": {"reference": "registry/qwen:1", "pullPolicy": "IfNotPresent"},
                "readOnly": True,
            },
        ),
    ],
)
def test_a_model_is_mounted_by_its_uri(
    model: dict[str, Any], volume: dict[str, Any], render: Render
) -> None:
    assert volume_at(pool_of(with_model(render, **model), "decode"), "/models/qwen") == volume


def test_models_on_one_claim_are_one_volume(render: Render) -> None:
    values = {
        "models": {"a": {"uri": "pvc://shared-models/a"}, "b": {"uri": "pvc://shared-models/b"}},
        "embedding": {"pools": {"a": {"model": "a"}, "b": {"model": "b"}}},
    }
    manifests = render("all", values=values)
    assert broken_rules(manifests, secrets=["s3-credentials"]) == []
    processor = pool_of(manifests, "processor")
    paths = {name: f"/models/{name}" for name in ("a", "b", "small")}
    found = {name: volume_at(processor, path) for name, path in paths.items()}
    assert {name: one["subPath"] for name, one in found.items()} == {
        "a": "a",
        "b": "b",
        "small": "qwen3-0.6b",
    }
    assert [one["persistentVolumeClaim"]["claimName"] for one in found.values()] == [
        "shared-models"
    ] * 3


@pytest.mark.parametrize(
    ("model", "requested"),
    [
        ({"size": "40Gi"}, "40Gi"),
        ({"size": "40Gi", "storageClass": "ssd"}, None),
        ({"size": "40Gi", "download": "job"}, None),
        ({"size": "40Gi", "uri": "pvc://claim/qwen"}, None),
        ({"size": ""}, None),
    ],
)
def test_the_disk_for_a_pods_own_copy_is_requested(
    model: dict[str, Any], requested: str | None, render: Render
) -> None:
    manifests = with_model(render, **model)
    requests = pool_of(manifests, "decode").container["resources"]["requests"]
    assert requests.get("ephemeral-storage") == requested
    processor = pool_of(manifests, "processor").container["resources"]["requests"]
    assert "ephemeral-storage" not in processor


def test_what_a_pool_says_of_its_disk_counts(render: Render) -> None:
    own = {"decode": {"resources": {"requests": {"ephemeral-storage": "90Gi"}}}}
    requests = pool_of(render("single-gpu", values=own), "decode").container["resources"][
        "requests"
    ]
    assert requests["ephemeral-storage"] == "90Gi"


@pytest.mark.parametrize("name", ["helm3", "helm4"])
def test_a_claim_that_is_there_can_only_grow(
    name: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    helm: Helm = request.getfixturevalue(name)
    before = helm.template("pd")
    # With the storage class that the cluster fills in.
    claims = [
        merged(one, {"spec": {"storageClassName": "standard"}})
        for one in objects(before, "PersistentVolumeClaim")
    ]

    def upgrade(**change: Any) -> None:
        values = {"models": {"llama": change}}
        render_on(helm, before, claims, tmp_path, "pd", values=values)

    upgrade(size="300Gi", revision="v2")
    for change, sentence in (
        ({"size": "100G"}, "models.llama.size is 100G, and its claim has 200Gi"),
        ({"accessModes": ["ReadWriteOnce"]}, "models.llama.accessModes is ReadWriteOnce, and its"),
        ({"storageClass": "fast"}, "models.llama.storageClass is fast, and its claim has standard"),
    ):
        with pytest.raises(RenderError, match=sentence):
            upgrade(**change)


def test_image_volumes_are_on_from_1_35_or_by_your_word(render: Render) -> None:
    model = {"models": {"qwen": {"uri": "oci://registry/qwen:1", "revision": ""}}}
    gate = {"downloads": {"imageVolumes": True}}
    for kubernetes, values in (("1.35", model), ("1.33", {**model, **gate})):
        manifests = render("single-gpu", values=values, kubernetes=kubernetes)
        assert "image" in volume_at(pool_of(manifests, "decode"), "/models/qwen")


def test_a_storage_class_gives_each_pod_a_volume(render: Render) -> None:
    manifests = with_model(render, storageClass="ssd", size="40Gi")
    spec = volume_at(pool_of(manifests, "decode"), "/models/qwen")["ephemeral"]
    assert spec["volumeClaimTemplate"]["spec"] == {
        "accessModes": ["ReadWriteOnce"],
        "storageClassName": "ssd",
        "resources": {"requests": {"storage": "40Gi"}},
    }


def test_files_in_the_image_are_only_named(render: Render) -> None:
    manifests = with_model(render, uri="file:///opt/models/qwen")
    decode, processor = pool_of(manifests, "decode"), pool_of(manifests, "processor")
    assert decode.config["model_path"] == "/opt/models/qwen"
    assert processor.config["models"] == ["qwen=/opt/models/qwen"]
    assert "initContainers" not in decode.pod
    assert "initContainers" not in processor.pod


def test_the_processor_fetches_tokenizers_only(render: Render) -> None:
    processor = pool_of(render("all"), "processor")
    fetched = {one["name"]: one["args"][3:] for one in processor.pod["initContainers"]}
    # Models for images and videos have no tokenizer there; files on a claim are mounted.
    assert sorted(fetched) == [
        "fetch-bge-reranker",
        "fetch-deepseek",
        "fetch-llada",
        "fetch-qwen-embedding",
        "fetch-qwen-vl",
    ]
    for args in fetched.values():
        assert (args[0], args[3]) == ("fetch", "--without-weights")


def test_a_tokenizer_may_come_from_elsewhere(render: Render) -> None:
    processor = pool_of(render("cpu-demo"), "processor")
    assert processor.config["models"] == ["demo=/models/demo"]
    (fetch,) = processor.pod["initContainers"]
    assert fetch["args"][4] == "hf://Qwen/Qwen3-0.6B"
    assert "model_path" not in pool_of(render("cpu-demo"), "decode").config
