"""EndpointSlices are followed through whatever happens to the API server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from kubernetes.aio import config
from kubernetes.aio.config import kube_config

from millstream_server.routing.discovery.kubernetes import KubernetesDiscovery
from millstream_server.routing.discovery.kubernetes_api import ClusterAccess
from millstream_server.routing.discovery.sources import Addresses
from millstream_testing.waiting import until
from tests.support.processor.fake_kubernetes import (
    NAMESPACE,
    SERVICE,
    FakeApiServer,
    endpoint,
    endpoint_slice,
)
from tests.support.wire.certificates import Authority

A, B, C = (f"10.0.0.{i}:50051" for i in (1, 2, 3))


def named(name: str, *addresses: str) -> dict[str, Any]:
    return endpoint_slice(name, *(endpoint(a.partition(":")[0], f"pod-{a}") for a in addresses))


class Followed:
    """Collects what a discovery yields."""

    def __init__(self) -> None:
        self.found: list[Addresses] = []

    async def until(self, *addresses: str) -> None:
        await until(lambda: bool(self.found) and self.found[-1] == set(addresses))


@contextlib.asynccontextmanager
async def following(
    access: ClusterAccess | None = None, namespace: str = ""
) -> AsyncIterator[Followed]:
    discovery = KubernetesDiscovery(SERVICE, namespace, access, first_pause_s=0.01)
    followed = Followed()

    async def follow() -> None:
        async for addresses in discovery.watch():
            followed.found.append(addresses)

    task = asyncio.ensure_future(follow())
    try:
        yield followed
    finally:
        assert not task.done(), "it never ends by itself"
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@pytest.fixture
async def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[FakeApiServer]:
    async with FakeApiServer() as server:
        file = str(server.kubeconfig(tmp_path / "kubeconfig"))
        monkeypatch.setattr(config, "KUBE_CONFIG_DEFAULT_LOCATION", file)
        monkeypatch.setattr(kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", file)
        yield server


def reasons(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        record.__dict__["fields"]["reason"]
        for record in caplog.records
        if record.levelname == "WARNING"
    ]


async def test_workers_that_come_and_go_are_followed(api: FakeApiServer) -> None:
    api.put(named("one", A))
    async with following() as workers:
        await workers.until(A)
        api.put(named("two", B, C))
        await workers.until(A, B, C)
        api.put(named("one"))
        await workers.until(B, C)
        api.delete("two")
        await workers.until()
        assert api.lists == 1
        assert workers.found == [{A}, {A, B, C}, {B, C}, set()]


async def test_a_discovery_that_is_watched_again_lists_again(api: FakeApiServer) -> None:
    api.put(named("one", A))
    discovery = KubernetesDiscovery(SERVICE, first_pause_s=0.01)
    for lists in (1, 2):  # what broke the first watch may have hidden a change
        watch = discovery.watch()
        assert await asyncio.wait_for(anext(watch), 5) == {A}
        assert api.lists == lists
        await watch.aclose()  # type: ignore[attr-defined]


async def test_a_service_that_does_not_exist_yet_has_no_workers(
    api: FakeApiServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with following(namespace=NAMESPACE) as workers:
        await workers.until()
        assert caplog.text.count("no EndpointSlices of the service yet") == 1
        api.put(named("one", A))
        await workers.until(A)
    assert not reasons(caplog)


async def test_a_watch_that_ends_goes_on_where_it_ended(api: FakeApiServer) -> None:
    api.put(named("one", A))
    async with following() as workers:
        await workers.until(A)
        await until(lambda: api.watching == 1)
        api.bookmark()
        api.end_watches()
        await until(lambda: api.watches == 2 and api.watching == 1)
        api.put(named("one", A, B))
        await workers.until(A, B)
    assert api.lists == 1
    assert api.watched_from == [101, 102], "the bookmark told how far it was"


async def test_changes_that_were_missed_are_listed(
    api: FakeApiServer, caplog: pytest.LogCaptureFixture
) -> None:
    api.put(named("one", A))
    async with following() as workers:
        await workers.until(A)
        await until(lambda: api.watching == 1)
        api._slices["one"] = named("one", B)
        api.forget_events()
        await workers.until(B)
        assert api.lists == 2
        await until(lambda: api.watching == 1)
        api.put(named("one", C))
        await workers.until(C)
    assert not reasons(caplog), "it is no failure"


async def test_a_lost_connection_is_made_again_and_the_workers_stay(api: FakeApiServer) -> None:
    api.put(named("one", A))
    async with following() as workers:
        await workers.until(A)
        await until(lambda: api.watching == 1)
        api.disconnect()
        await until(lambda: api.lists == 2 and api.watching == 1)
        api.put(named("two", B))
        await workers.until(A, B)
        assert workers.found == [{A}, {A, B}]


async def test_while_the_api_server_is_away_the_workers_stay_and_it_is_said_once(
    api: FakeApiServer, caplog: pytest.LogCaptureFixture
) -> None:
    connections = 0

    def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        writer.close()

    api.put(named("one", A))
    async with following() as workers:
        await workers.until(A)
        await api.stop()
        await until(lambda: len(reasons(caplog)) == 1)
        async with await asyncio.start_server(hang_up, "127.0.0.1", api.port):
            await until(lambda: connections >= 4)
        api.put(named("one", B))
        await api.start()
        await workers.until(B)
        assert workers.found == [{A}, {B}]
    assert len(reasons(caplog)) == len(set(reasons(caplog))) <= 3
    assert all(f"no connection to the API server {api.url}: " in r for r in reasons(caplog))


@pytest.mark.parametrize("verb", ["list", "watch"])
async def test_a_missing_role_is_named_once_and_noticed_when_it_is_there(
    api: FakeApiServer, caplog: pytest.LogCaptureFixture, verb: str
) -> None:
    api.put(named("one", A))
    api.refused = {verb: 403}
    async with following() as workers:
        await until(lambda: api.lists + api.watches >= 5)
        (reason,) = reasons(caplog)
        assert reason == (
            f"the service account may not {verb} endpointslices in the namespace {NAMESPACE}: it "
            "needs a Role there with apiGroups [discovery.k8s.io], resources [endpointslices], "
            "verbs [get, list, watch], and a RoleBinding"
        )
        api.refused = {}
        await until(lambda: api.watching == 1)
        await workers.until(A)


async def test_any_other_refusal_is_repeated_in_the_servers_words(
    api: FakeApiServer, caplog: pytest.LogCaptureFixture
) -> None:
    api.refused = {"list": 503}
    async with following() as workers:
        await until(lambda: api.lists >= 3)
        api.refused = {}
        await workers.until()
    assert reasons(caplog) == [f"the API server {api.url} replied 503: refused by the test"]


@pytest.mark.parametrize(
    "garbage",
    [
        "<html>a proxy's page</html>",
        "[]",
        "{}",
        "[" * 100_000,
        '{"metadata": {"resourceVersion": "1"}, "items": [7]}',
        '{"metadata": {"resourceVersion": "1"}, "items": [{"metadata": {}, "endpoints": 7}]}',
    ],
)
async def test_a_list_that_is_none_keeps_the_workers(
    api: FakeApiServer, caplog: pytest.LogCaptureFixture, garbage: str
) -> None:
    api.put(named("one", A))
    async with following() as workers:
        await workers.until(A)
        await until(lambda: api.watching == 1)
        api.raw_list = garbage
        api.disconnect()
        lists = api.lists
        await until(lambda: api.lists >= lists + 2)
        assert workers.found == [{A}]
        assert any("as it should be" in r or "something else" in r for r in reasons(caplog))
        api.raw_list = None
        await until(lambda: api.watching == 1)
        api.put(named("one", B))
        await workers.until(B)


@pytest.mark.parametrize(
    "line",
    [
        "garbage\n",
        "[" * 100_000 + "\n",
        "[1]\n",
        '{"type": "MODIFIED"}\n',
        '{"type": "MODIFIED", "object": {"metadata": {"resourceVersion": "7"}, "endpoints": 5}}\n',
        json.dumps({"type": "ERROR", "object": {"code": 500, "message": "etcd"}}) + "\n",
    ],
)
async def test_an_event_that_is_none_makes_it_list_anew(api: FakeApiServer, line: str) -> None:
    api.put(named("one", A))
    async with following() as workers:
        await workers.until(A)
        await until(lambda: api.watching == 1)
        api.send(line)
        await until(lambda: api.lists == 2 and api.watching == 1)
        api.put(named("one", B))
        await workers.until(B)
        assert workers.found == [{A}, {B}]


async def test_a_slow_event_in_pieces_is_read_whole(api: FakeApiServer) -> None:
    async with following() as workers:
        await workers.until()
        await until(lambda: api.watching == 1)
        changed = named("one", A)
        changed["metadata"]["resourceVersion"] = "200"
        line = json.dumps({"type": "ADDED", "object": changed}) + "\n"
        for piece in (line[:40], line[40:100]):
            api.send(piece)
        api.send(line[100:])
        await workers.until(A)


async def test_a_service_with_the_wrong_ports_is_explained_and_keeps_the_workers(
    api: FakeApiServer, caplog: pytest.LogCaptureFixture
) -> None:
    api.put(named("one", A))
    async with following() as workers:
        await workers.until(A)
        await until(lambda: api.watching == 1)
        api.put(
            endpoint_slice(
                "one", endpoint("10.0.0.2"), ports=[{"name": x, "port": 1} for x in ("a", "b")]
            )
        )
        await until(lambda: api.lists >= 3)
        assert len(reasons(caplog)) == 1
        assert "EndpointSlice one has the ports a, b" in reasons(caplog)[0]
        assert workers.found == [{A}]
        api.put(named("one", B))
        await workers.until(B)


# ---- as the service account of a pod


@pytest.fixture
def account(tmp_path: Path) -> Path:
    folder = tmp_path / "serviceaccount"
    folder.mkdir()
    (folder / "namespace").write_text(NAMESPACE)
    return folder


async def test_in_a_pod_its_token_is_used_and_read_again_when_it_is_replaced(
    account: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    issued = Authority().issue("127.0.0.1")
    for name, content in {
        "ca.crt": issued.ca,
        "tls.crt": issued.cert,
        "tls.key": issued.key,
    }.items():
        (account / name).write_bytes(content)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(account / "tls.crt", account / "tls.key")
    async with FakeApiServer(tls) as api:
        (account / "token").write_text(api.token)
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(api.port))
        api.put(named("one", A))
        async with following(ClusterAccess(account)) as workers:
            await workers.until(A)
            await until(lambda: api.watching == 1)
            api.token = "the-next-token"  # noqa: S105
            api.end_watches()
            await until(lambda: bool(reasons(caplog)))
            (account / "token").write_text(api.token)
            await until(lambda: api.watching == 1)
            api.put(named("one", B))
            await workers.until(B)
    assert reasons(caplog) == [f"the API server {api.url} doesn't know these credentials (401)"]


async def test_a_pod_without_the_addresses_of_the_api_server_says_so(
    account: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (account / "token").write_text("t")
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    async with following(ClusterAccess(account)):
        await until(lambda: bool(reasons(caplog)))
    assert reasons(caplog) == ["no access to a cluster: Service host/port is not set."]
