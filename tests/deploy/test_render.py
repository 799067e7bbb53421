"""The chart renders, with every Helm and for every Kubernetes, and refuses what it doesn't know."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import yaml

from tests.support.deploy.deploy_tools import (
    CHART,
    KUBERNETES,
    Helm,
    Manifest,
    RenderError,
    values_files,
)
from tests.support.deploy.kube_rules import broken_rules

VALUES = values_files()
Render = Callable[..., list[Manifest]]


def without_random(manifests: Sequence[Manifest]) -> list[Manifest]:
    """Hide what a render makes up: the values of generated secrets."""
    return [
        {**manifest, "data": sorted(manifest["data"])}
        if manifest["kind"] == "Secret" and "data" in manifest
        else manifest
        for manifest in manifests
    ]


def test_the_chart_has_its_examples() -> None:
    assert {"all", "cpu-demo", "epd", "multinode", "pd", "single-gpu"} <= set(VALUES)


@pytest.mark.parametrize("name", VALUES)
def test_both_helms_lint_an_example_strictly(name: str, helm3: Helm, helm4: Helm) -> None:
    for helm in (helm3, helm4):
        assert "0 chart(s) failed" in helm.lint(name)


@pytest.mark.parametrize("name", VALUES)
def test_both_helms_render_the_same(name: str, helm3: Helm, helm4: Helm) -> None:
    assert without_random(helm3.template(name)) == without_random(helm4.template(name))


@pytest.mark.parametrize("version", KUBERNETES)
def test_kubernetes_knows_every_field_of_the_examples(
    version: str, render: Render, kube_validate: Callable[[Sequence[Manifest], str], None]
) -> None:
    for name in VALUES:
        kube_validate(render(name, kubernetes=version), version)


# The other two ask for a LeaderWorkerSet: refused there, see test_refusals.
@pytest.mark.parametrize("name", sorted({*VALUES} - {"all", "multinode"}))
def test_a_cluster_without_custom_resources_gets_none(
    name: str, render: Render, kube_validate: Callable[[Sequence[Manifest], str], None]
) -> None:
    manifests = render(name, apis=())
    custom = {m["apiVersion"] for m in manifests if "." in m["apiVersion"].partition("/")[0]}
    assert all(api.partition("/")[0].endswith(".k8s.io") for api in custom), custom
    kube_validate(manifests, KUBERNETES[0])


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("processsor", {"processsor": {"replicas": 3}}),
        ("replica", {"processor": {"replica": 3}}),
        ("replica", {"decode": {"pools": {"main": {"replica": 3}}}}),
        ("enable", {"security": {"tls": {"enable": True}}}),
        ("limitSecond", {"poolDefaults": {"drain": {"limitSecond": 3}}}),
    ],
)
@pytest.mark.parametrize("helm", ["helm3", "helm4"])
def test_a_misspelt_key_is_refused_by_its_name(
    helm: str, key: str, values: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    with pytest.raises(RenderError, match=rf"additional properties '{key}' not allowed"):
        request.getfixturevalue(helm).text("pd", values=values)


@pytest.mark.parametrize("name", VALUES)
def test_a_cluster_would_take_an_example(name: str, render: Render) -> None:
    manifests = render(name)
    assert broken_rules(manifests, secrets=existing_secrets(name)) == []


def existing_secrets(name: str) -> list[str]:
    """Name the secrets that an example says exist already."""
    values = yaml.safe_load((CHART / f"values-{name}.yaml").read_text(encoding="utf-8"))

    def named(value: Any, key: str = "") -> Iterator[str]:
        if isinstance(value, dict):
            for inner, part in value.items():
                yield from named(part, key + "." + inner)
        elif isinstance(value, str) and re.search(r"[sS]ecrets?(\.\w+)?(\.name)?$", key):
            yield value

    return list(named(values))


@pytest.mark.parametrize("helm", ["helm3", "helm4"])
def test_null_removes_a_pool_and_a_model_of_an_example(
    helm: str, request: pytest.FixtureRequest
) -> None:
    values = {"models": {"llada": None}, "diffusion": {"pools": {"text": None}}}
    manifests = request.getfixturevalue(helm).template("all", values=values)
    names = {one["metadata"]["name"] for one in manifests if one["kind"] == "Deployment"}
    assert "suite-millstream-diffusion-images" in names
    assert "suite-millstream-diffusion-text" not in names
    assert "llada" not in str(manifests)


def test_names_stay_within_bounds_with_long_ones(render: Render) -> None:
    values = {"fullnameOverride": "a-release-with-a-name-of-sixty-three-characters-" + "x" * 15}
    assert broken_rules(render("pd", values=values), secrets=existing_secrets("pd")) == []


def named(length: int, filler: str = "-") -> str:
    """Make a name of a length, which would end badly wherever it is cut."""
    return ("m" + filler * length)[: length - 1] + "m"


MODELS = [named(length) for length in (1, 2, 6, 7, 12, 13, 20, 21, 25, 26, 31, 32, 36, 37, 40)]
MODELS += [named(41), named(63), named(12, "."), named(63, "."), "x", "x-back", "a.b", "a-b"]


@pytest.mark.parametrize(
    ("release", "models"),
    [
        ("7", MODELS[::2]),
        ("millstream", MODELS[1::2]),
        (named(36), MODELS[4:12]),
        (named(53), MODELS[12:]),
    ],
)
def test_every_name_is_valid_and_there_once(
    release: str, models: Sequence[str], render: Render
) -> None:
    """With names of all lengths at which one was, or is, cut."""
    pools = {named(1 + 19 * i % 20): {"model": model} for i, model in enumerate(models)}
    files = {m: {"uri": f"hf://o/{m}", "download": "job", "size": "1Gi"} for m in models}
    values = {
        "models": files,
        "decode": {"enabled": True, "pools": pools},
        "prefill": {"enabled": True, "pools": dict(list(pools.items())[::2])},
        "encode": {"enabled": True, "pools": dict(list(pools.items())[1::2])},
    }
    assert broken_rules(render(values=values, release=release)) == []


def test_what_cannot_be_named_is_refused(helm4: Helm) -> None:
    with pytest.raises(RenderError, match="can't be the name of an object; shorten fullname"):
        helm4.text("cpu-demo", values={"fullnameOverride": "x" * 250})
    with pytest.raises(RenderError, match="maxLength: got 64, want 63"):
        helm4.text("cpu-demo", values={"models": {"x" * 64: {}}})
