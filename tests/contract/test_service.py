"""What `runtime.lifecycle.service` makes of settings: which ports, and who may use them."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from millstream.v1 import admin_pb2, admin_pb2_grpc, worker_pb2, worker_pb2_grpc
from millstream_server.runtime.lifecycle.service import Service, ServicePlan, peers_policy
from millstream_server.runtime.lifecycle.service_settings import ServiceSettings
from millstream_server.runtime.rpc.channel import open_channel
from millstream_server.runtime.security.tls import ClientTls
from millstream_server.runtime.settings import SettingsError
from millstream_server.runtime.telemetry.counts import LoadMeter
from tests.support.processes.ports import free_port
from tests.support.wire.certificates import Authority, SecretMount
from tests.support.wire.echo_service import raw_call
from tests.support.wire.failures import refusal
from tests.support.wire.raw_http2 import connected, request_fields
from tests.support.worker.without_optional_rpcs import WorkerWithoutOptionalRpcs

NAME = "millstream.v1.WorkerService"
PLAIN = ServiceSettings(listen="127.0.0.1:0", metrics_listen="")
SERVING = health_pb2.HealthCheckResponse.SERVING


class Worker(WorkerWithoutOptionalRpcs):
    async def GetWorkerInfo(
        self, request: worker_pb2.GetWorkerInfoRequest, context: Any
    ) -> worker_pb2.GetWorkerInfoResponse:
        return worker_pb2.GetWorkerInfoResponse()

    async def WatchWorkerInfo(
        self, request: worker_pb2.WatchWorkerInfoRequest, context: Any
    ) -> AsyncIterator[worker_pb2.WatchWorkerInfoResponse]:
        yield worker_pb2.WatchWorkerInfoResponse()

    async def WatchLoad(
        self, request: worker_pb2.WatchLoadRequest, context: Any
    ) -> AsyncIterator[worker_pb2.WatchLoadResponse]:
        yield worker_pb2.WatchLoadResponse()


@contextlib.asynccontextmanager
async def listening(settings: ServiceSettings) -> AsyncIterator[Service]:
    service = Service(settings, "test")
    plan = ServicePlan(
        services=(NAME,),
        max_receive_bytes=1 << 20,
        load=LoadMeter(lambda: 0.5),
        open_work=lambda: {"requests": 7},
    )
    server = service.prepare(plan)
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(Worker(), server.methods)
    try:
        await service.listen()
        server.set_serving(serving=True)
        yield service
    finally:
        await service.close()


@pytest.fixture
def secured(tmp_path: Path) -> ServiceSettings:
    authority, mount = Authority(), SecretMount(tmp_path)
    mount.put(authority.issue("localhost"))
    return replace(PLAIN, tls_cert_file=mount.cert, tls_key_file=mount.key)


async def check(channel: Any) -> int:
    stub: Any = health_pb2_grpc.HealthStub(channel)
    answer = await stub.Check(health_pb2.HealthCheckRequest(service=NAME))
    return int(answer.status)


async def test_probes_without_tls_have_an_address_that_answers_nothing_else(
    secured: ServiceSettings,
) -> None:
    address = f"127.0.0.1:{free_port()}"
    async with (
        listening(replace(secured, health_listen=address)),
        grpc.aio.insecure_channel(address) as channel,
    ):
        assert await check(channel) == SERVING
        other: Any = worker_pb2_grpc.WorkerServiceStub(channel)
        refused = await refusal(other.GetWorkerInfo(worker_pb2.GetWorkerInfoRequest()))
        assert refused.code is grpc.StatusCode.UNIMPLEMENTED
        await _survives_a_path_that_isnt_text(address)
        host, _, port = address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET /readyz?service=" + NAME.encode() + b" HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 200 ")
        writer.close()


async def _survives_a_path_that_isnt_text(address: str) -> None:
    """It ends the process that serves it by grpc.aio, see test_failed_start.py."""
    async with connected(int(address.rpartition(":")[2])) as wire:
        fields = [(k, v) for k, v in request_fields("") if k != ":path"]
        refused = wire.rpc(fields=[*fields[:2], (":path", b"/\xff"), *fields[2:]], end=True)
        assert await refused.code() == grpc.StatusCode.INTERNAL.value[0]
        normal = wire.rpc("/grpc.health.v1.Health/Check")
        normal.send(b"", end=True)
        assert await normal.code() == 0


async def test_who_calls_the_wrong_service_gets_the_right_names() -> None:
    address = f"127.0.0.1:{free_port()}"
    async with (
        listening(replace(PLAIN, listen=address)),
        grpc.aio.insecure_channel(address) as channel,
    ):
        method = "/millstream.v1.ProcessorService/Chat"
        refused = await refusal(raw_call(channel, "unary_unary", method, None))
        assert refused.code is grpc.StatusCode.UNIMPLEMENTED
        assert refused.reason == "UNKNOWN_METHOD"
        assert refused.message == (
            f"this server has no method millstream.v1.ProcessorService/Chat; it serves {NAME}"
        )
        endless = raw_call(channel, "unary_unary", "/" + "x" * 4000, None)
        assert len((await refusal(endless)).message) < 300


async def test_the_admin_address_is_apart() -> None:
    address = f"127.0.0.1:{free_port()}"
    async with (
        listening(replace(PLAIN, admin_listen=address)),
        grpc.aio.insecure_channel(address) as channel,
    ):
        stub: Any = admin_pb2_grpc.AdminServiceStub(channel)
        answer = await stub.GetServerStatus(admin_pb2.GetServerStatusRequest())
        assert dict(answer.status.open_work) == {"requests": 7}
        assert answer.status.settings["admin_listen"] == address


async def test_with_keys_an_admin_address_without_tls_is_for_their_holders() -> None:
    address, key = f"127.0.0.1:{free_port()}", "k" * 32
    digest = hashlib.sha256(key.encode()).hexdigest()
    settings = replace(PLAIN, admin_listen=address, admin_keys=f"ops:sha256:{digest}")
    async with listening(settings), grpc.aio.insecure_channel(address) as channel:
        assert await check(channel) == SERVING
        stub: Any = admin_pb2_grpc.AdminServiceStub(channel)
        request = admin_pb2.GetServerStatusRequest()
        channelz = raw_call(channel, "unary_unary", "/grpc.channelz.v1.Channelz/GetServers", None)
        wrong = (("authorization", f"Bearer {key}k"),)
        for call in (stub.GetServerStatus(request), stub.GetServerStatus(request, metadata=wrong)):
            refused = await refusal(call)
            assert (refused.code, refused.reason) == (
                grpc.StatusCode.UNAUTHENTICATED,
                "UNAUTHENTICATED",
            )
            assert refused.message.startswith("this server requires a valid API key; send it as")
        assert (await refusal(channelz)).code is grpc.StatusCode.UNAUTHENTICATED
        known = (("authorization", f"Bearer {key}"),)
        answer = await stub.GetServerStatus(request, metadata=known)
        assert answer.status.settings["admin_keys"] == "***"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"admin_listen": "127.0.0.1:1", "admin_keys": "a:b"}, "MILLSTREAM_ADMIN_KEYS: entry 1: "),
        ({"admin_listen": "0.0.0.0:1"}, "without TLS the admin services listen on a loopback"),
        ({"tls_cert_file": Path("c.pem")}, "--tls-cert-file and --tls-key-file belong together"),
        ({"tls_client_ca_file": Path("ca.pem")}, "belong together"),
        ({"trace_sample_ratio": 1.5, "otlp_endpoint": "http://127.0.0.1:1"}, "sample"),
    ],
)
async def test_settings_that_contradict_each_other_are_named(
    changes: dict[str, Any], says: str
) -> None:
    settings = replace(PLAIN, **changes)
    with pytest.raises(SettingsError, match=says):
        async with listening(settings):
            pass


async def test_operators_may_have_a_ca_of_their_own(tmp_path: Path) -> None:
    """So that a Processor with API keys asks its clients for no certificates."""
    servers, operators = Authority(), Authority()
    served, held = SecretMount(tmp_path / "server"), SecretMount(tmp_path / "operator")
    served.put(servers.issue("localhost"), operators.pem)
    held.put(operators.issue("ops.example"), servers.pem)
    port = free_port()
    settings = replace(
        PLAIN,
        tls_cert_file=served.cert,
        tls_key_file=served.key,
        admin_listen=f"localhost:{port}",
        admin_client_ca_file=served.ca,
        admin_peers=("ops.example",),
    )
    tls = ClientTls(held.root)
    async with (
        listening(settings),
        open_channel(f"localhost:{port}", tls, options=[]) as channel,
        open_channel(
            f"localhost:{port}", ClientTls(held.of_ca()), options=[]
        ) as without_certificate,
    ):
        stub: Any = admin_pb2_grpc.AdminServiceStub(channel)
        answer = await stub.GetServerStatus(admin_pb2.GetServerStatusRequest())
        assert answer.status.services == [NAME]
        refused_stub: Any = admin_pb2_grpc.AdminServiceStub(without_certificate)
        refused = await refusal(refused_stub.GetServerStatus(admin_pb2.GetServerStatusRequest()))
        assert refused.code is grpc.StatusCode.UNAVAILABLE


async def test_admin_over_tls_wants_operators_to_be_named(secured: ServiceSettings) -> None:
    with pytest.raises(SettingsError, match="set --admin-client-ca-file and --admin-peers"):
        async with listening(replace(secured, admin_listen="127.0.0.1:1")):
            pass


def test_peers_without_a_ca_are_refused() -> None:
    with pytest.raises(SettingsError, match="--allowed-peers: set --tls-client-ca-file"):
        peers_policy(replace(PLAIN, allowed_peers=("worker",)))
    assert peers_policy(PLAIN) is None


async def test_a_taken_port_is_named() -> None:
    async with listening(replace(PLAIN, health_listen=f"127.0.0.1:{free_port()}")) as service:
        taken = service._settings.health_listen
        with pytest.raises(OSError, match=f"can't listen on {taken}"):
            async with listening(replace(PLAIN, health_listen=taken)):
                pass
