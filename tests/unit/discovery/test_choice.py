"""The entries of --workers."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from millstream_server.routing.discovery import kubernetes_api
from millstream_server.routing.discovery.kubernetes import KubernetesDiscovery
from millstream_server.routing.discovery.sources import DnsDiscovery, FileDiscovery, make_discovery
from millstream_server.runtime.settings import SettingsError


@pytest.mark.parametrize(
    ("workers", "sentence"),
    [
        ([], "name at least one worker"),
        (["a"], "'a' is not HOST:PORT"),
        (["a:1", ":2"], "':2' is not HOST:PORT"),
        (["a:0"], "'a:0' is not HOST:PORT"),
        (["a:65536"], "'a:65536' is not HOST:PORT"),
        (["http://a:1"], "'http://a:1' is not HOST:PORT"),
        (["::1:1"], "'::1:1' is not HOST:PORT"),
        (["a b:1"], "'a b:1' is not HOST:PORT"),
        (["a:" + "1" * 5000], "is not HOST:PORT"),
        (["dns:workers"], "'dns:workers' is not dns:NAME:PORT"),
        (["dns:workers:x"], "'dns:workers:x' is not dns:NAME:PORT"),
        (["dns:///workers:1"], "is not dns:NAME:PORT"),
        (["a:1", "dns:workers"], "'dns:workers' is not dns:NAME:PORT"),
        (["a:1", "dns:workers:1", "b"], "'b' is not HOST:PORT"),
        (["k8s:"], "'k8s:' is not k8s:SERVICE"),
        (["k8s:shop/workers/x"], "'k8s:shop/workers/x' is not k8s:SERVICE"),
        (["k8s:workers:50051"], "the port is the service's own, named grpc"),
        (["k8s:Workers"], "'k8s:Workers' is not"),
        (["file:"], "needs a path"),
        (["file:/no/such/file"], "can't read /no/such/file: No such file or directory"),
    ],
)
def test_a_wrong_setting_is_refused_in_a_sentence(workers: list[str], sentence: str) -> None:
    with pytest.raises(SettingsError) as refused:
        make_discovery(workers)
    assert str(refused.value).startswith("--workers: ")
    assert sentence in str(refused.value)


def test_the_setting_makes_each_kind(tmp_path: Path) -> None:
    path = tmp_path / "workers"
    path.write_text("a:1")
    assert isinstance(make_discovery(["dns:workers.default.svc:50061"]), DnsDiscovery)
    assert isinstance(make_discovery([f"file:{path}"]), FileDiscovery)


async def test_entries_of_all_kinds_are_merged(tmp_path: Path) -> None:
    path = tmp_path / "workers"
    path.write_text("b:2")
    # A host may have the name of a kind.
    entries = ["a:1", "[::1]:3", f"file:{path}", "dns:localhost:7", "dns:7", "a:1", "k8s:8"]
    watch = make_discovery(entries).watch()
    found = await asyncio.wait_for(anext(watch), 5)
    while not found >= {"a:1", "[::1]:3", "b:2", "dns:7", "k8s:8", "127.0.0.1:7"}:
        found = await asyncio.wait_for(anext(watch), 5)
    await watch.aclose()  # type: ignore[attr-defined]


def test_a_service_needs_a_cluster_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kubernetes.aio import config  # noqa: PLC0415

    monkeypatch.setattr(config, "KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "none"))
    with pytest.raises(SettingsError) as refused:
        make_discovery(["k8s:workers"])
    assert "neither a service account's token in /var/run/secrets/kubernetes.io" in str(
        refused.value
    )
    assert f"nor a kubeconfig file {tmp_path / 'none'}" in str(refused.value)
    (tmp_path / "none").touch()
    assert isinstance(make_discovery(["k8s:workers"]), KubernetesDiscovery)


def test_a_service_needs_the_client_library_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    monkeypatch.setitem(sys.modules, "kubernetes.aio", None)
    with pytest.raises(SettingsError, match=r"pip install 'millstream\[kubernetes\]'"):
        kubernetes_api.ClusterAccess().check()
